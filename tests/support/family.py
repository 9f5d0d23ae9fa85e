"""Small models of Kimi K2's relatives, and each in transformers' form.

Every way in which the presets differ from K2 is in one of them: direct queries, rope without
scaling or with other corrections, gates by softmax or over groups of experts, several shared
experts, several dense layers, 16-bit weights.
"""

from typing import Any

from torch import Tensor

from bench.speed.deepseek_v3 import deepseek_state
from tests.support.helpers import tiny_config

YARN = tiny_config()["rope_scaling"]


def _v2(**changes: Any) -> dict[str, Any]:
    mscale = {"mscale": 0.707, "mscale_all_dim": 0.707}
    return {
        "model_type": "deepseek_v2",
        "scoring_func": "softmax",
        "norm_topk_prob": False,
        "rope_theta": 10000.0,
        "rope_scaling": YARN | {"factor": 40.0, "beta_fast": 32.0} | mscale,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "n_shared_experts": 2,
        "quantization_config": None,
    } | changes


RELATIVES: dict[str, dict[str, Any]] = {
    "deepseek-v3": {
        "model_type": "deepseek_v3",
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "n_routed_experts": 16,
        "num_experts_per_tok": 4,
        "n_group": 4,
        "topk_group": 2,
        "routed_scaling_factor": 2.5,
        "rope_theta": 10000.0,
        "rope_scaling": YARN | {"factor": 40.0, "beta_fast": 32.0},
        "num_nextn_predict_layers": 1,
    },
    "moonlight": {
        "model_type": "deepseek_v3",
        "q_lora_rank": None,
        "rope_scaling": None,
        "n_shared_experts": 2,
        "routed_scaling_factor": 2.446,
        "quantization_config": None,
    },
    "deepseek-v2-lite": _v2(q_lora_rank=None, topk_method="greedy", routed_scaling_factor=1.0),
    "deepseek-v2": _v2(
        num_hidden_layers=4,
        first_k_dense_replace=2,
        topk_method="group_limited_greedy",
        n_routed_experts=12,
        n_group=4,
        topk_group=2,
        routed_scaling_factor=16.0,
    ),
}


def relative_config(name: str, **changes: Any) -> dict[str, Any]:
    """The content of a relative's `config.json`."""
    return tiny_config(**RELATIVES[name] | changes)


def _is_v2(raw: dict[str, Any]) -> bool:
    return bool(raw["model_type"] == "deepseek_v2")


def _published(raw: dict[str, Any]) -> Any:
    from transformers.models.deepseek_v2 import modeling_deepseek_v2 as v2
    from transformers.models.deepseek_v3 import modeling_deepseek_v3 as v3

    return v2 if _is_v2(raw) else v3


def published_config(raw: dict[str, Any]) -> Any:
    """fp32, everything eager, no quantisation."""
    from transformers import DeepseekV2Config, DeepseekV3Config

    dropped = ("model_type", "scoring_func", "quantization_config", "num_nextn_predict_layers")
    own = {k: v for k, v in raw.items() if k not in dropped}
    eager = {"attn_implementation": "eager", "experts_implementation": "eager"}
    kind = DeepseekV2Config if _is_v2(raw) else DeepseekV3Config
    return kind(**own, dtype="float32", **eager)


def published_layer(raw: dict[str, Any], layer: int, state: dict[str, Tensor]) -> Any:
    """A decoder layer with the state of one of our blocks."""
    module, config = _published(raw), published_config(raw)
    kind = "DeepseekV2DecoderLayer" if _is_v2(raw) else "DeepseekV3DecoderLayer"
    theirs = getattr(module, kind)(config, layer)
    theirs.load_state_dict(deepseek_state(state, raw["n_routed_experts"]))
    return theirs.requires_grad_(False).eval()


def published_tables(raw: dict[str, Any], x: Tensor, positions: Tensor) -> Any:
    """What a decoder layer takes as position embeddings: cos and sin, or both as a complex one."""
    module, config = _published(raw), published_config(raw)
    kind = "DeepseekV2RotaryEmbedding" if _is_v2(raw) else "DeepseekV3RotaryEmbedding"
    return getattr(module, kind)(config)(x, positions)


def published_model(raw: dict[str, Any], state: dict[str, Tensor]) -> Any:
    """The causal language model."""
    from transformers import DeepseekV2ForCausalLM, DeepseekV3ForCausalLM

    kind = DeepseekV2ForCausalLM if _is_v2(raw) else DeepseekV3ForCausalLM
    theirs = kind(published_config(raw))
    theirs.load_state_dict(deepseek_state(state, raw["n_routed_experts"]))
    return theirs.requires_grad_(False).eval()


def gate_by_hand(
    h_MD: Tensor, weight_ED: Tensor, bias_E: Tensor | None, raw: dict[str, Any]
) -> list[dict[int, float]]:
    """Each token's experts and their weights, from the rules of the papers, in fp64, in loops."""
    size = raw["n_routed_experts"] // raw["n_group"]
    sigmoid = raw.get("scoring_func", "sigmoid") == "sigmoid"
    found = []
    for logits in h_MD.double() @ weight_ED.double().T:
        scores = logits.sigmoid() if sigmoid else logits.exp() / logits.exp().sum()
        choice = (scores if bias_E is None else scores + bias_E.double()).tolist()
        groups = [sorted(choice[i : i + size])[::-1] for i in range(0, len(choice), size)]
        worth = [sum(group[:2]) if sigmoid else group[0] for group in groups]
        kept = sorted(range(len(groups)), key=lambda g: -worth[g])[: raw["topk_group"]]
        allowed = [e for e in range(len(choice)) if e // size in kept]
        chosen = sorted(allowed, key=lambda e: -choice[e])[: raw["num_experts_per_tok"]]
        weights = {e: float(scores[e]) for e in chosen}
        total = sum(weights.values()) if raw["norm_topk_prob"] else 1.0
        scaled = sigmoid or not raw["norm_topk_prob"]
        scaling = raw["routed_scaling_factor"] if scaled else 1.0
        found.append({e: w / total * scaling for e, w in weights.items()})
    return found
