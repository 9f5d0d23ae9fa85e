"""Names and shapes of the tensors that a config calls for, as published."""

from graphs.contract.config import ModelConfig


def layer_tensors(config: ModelConfig, layer: int) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor of one layer, without scales."""
    D, Q, C = config.hidden_size, config.q_lora_rank, config.kv_lora_rank
    H, N, R = config.num_attention_heads, config.qk_nope_head_dim, config.qk_rope_head_dim
    V, E = config.v_head_dim, config.n_routed_experts
    queries: dict[str, tuple[int, ...]] = {"self_attn.q_proj.weight": (H * (N + R), D)}
    if Q is not None:
        queries = {
            "self_attn.q_a_proj.weight": (Q, D),
            "self_attn.q_a_layernorm.weight": (Q,),
            "self_attn.q_b_proj.weight": (H * (N + R), Q),
        }
    attention = queries | {
        "self_attn.kv_a_proj_with_mqa.weight": (C + R, D),
        "self_attn.kv_a_layernorm.weight": (C,),
        "self_attn.kv_b_proj.weight": (H * (N + V), C),
        "self_attn.o_proj.weight": (D, H * V),
        "input_layernorm.weight": (D,),
        "post_attention_layernorm.weight": (D,),
    }

    def swiglu(prefix: str, width: int) -> dict[str, tuple[int, ...]]:
        return {
            f"{prefix}.gate_proj.weight": (width, D),
            f"{prefix}.up_proj.weight": (width, D),
            f"{prefix}.down_proj.weight": (D, width),
        }

    if config.block_type(layer) == "dense":
        feedforward = swiglu("mlp", config.intermediate_size)
    else:
        feedforward = {
            "mlp.gate.weight": (E, D),
            **swiglu("mlp.shared_experts", config.shared_intermediate_size),
        }
        if config.has_gate_bias:
            feedforward["mlp.gate.e_score_correction_bias"] = (E,)
        for expert in range(E):
            feedforward |= swiglu(f"mlp.experts.{expert}", config.moe_intermediate_size)
    return {f"model.layers.{layer}.{k}": v for k, v in (attention | feedforward).items()}


def expected_tensors(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor of the model, without scales."""
    D, vocab = config.hidden_size, config.vocab_size
    tensors: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (vocab, D),
        "model.norm.weight": (D,),
        "lm_head.weight": (vocab, D),
    }
    for layer in range(config.num_hidden_layers):
        tensors |= layer_tensors(config, layer)
    return tensors


def is_linear(name: str) -> bool:
    """Whether FP8 checkpoints store this tensor as FP8: all linear layers but the gate."""
    return name.endswith("_proj.weight") or name.endswith("kv_a_proj_with_mqa.weight")


def is_routed(name: str) -> bool:
    """Whether the tensor is a routed expert's, which INT4 checkpoints store in 4 bits."""
    return ".mlp.experts." in name
