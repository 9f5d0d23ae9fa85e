"""A small model of the K2 family, as raw config, as weights, as a checkpoint, and in transformers'
form.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from export.checkpoint.open import Checkpoint
from export.checkpoint.tensor_names import expected_tensors
from export.synthetic.write_checkpoint import write_checkpoint
from graphs.contract.config import ModelConfig


def tiny_config(**changes: Any) -> dict[str, Any]:
    """The content of a `config.json`; no matrix is a whole number of 128×128 blocks."""
    raw: dict[str, Any] = {
        "model_type": "kimi_k2",
        "vocab_size": 258,
        "hidden_size": 160,
        "num_hidden_layers": 3,
        "num_attention_heads": 3,
        "num_key_value_heads": 3,
        "q_lora_rank": 136,
        "kv_lora_rank": 56,
        "qk_nope_head_dim": 24,
        "qk_rope_head_dim": 16,
        "v_head_dim": 20,
        "intermediate_size": 144,
        "moe_intermediate_size": 72,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "num_experts_per_tok": 3,
        "first_k_dense_replace": 1,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.827,
        "rms_norm_eps": 1e-5,  # not the latent norms' 1e-6, so that a mix-up shows
        "max_position_embeddings": 512,
        "rope_theta": 50000.0,
        "rope_scaling": {
            "type": "yarn",
            "factor": 32.0,
            "beta_fast": 1.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 4096,
        },
        "bos_token_id": 256,
        "eos_token_id": 257,
        "quantization_config": {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [128, 128],
        },
    }
    return raw | changes


INT4: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "quantization_status": "compressed",
    "kv_cache_scheme": None,
    "global_compression_ratio": None,
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "input_activations": None,
            "output_activations": None,
            "weights": {
                "num_bits": 4,
                "type": "int",
                "symmetric": True,
                "strategy": "group",
                "group_size": 32,
                "dynamic": False,
                "actorder": None,
                "block_structure": None,
                "observer": "minmax",
                "observer_kwargs": {},
            },
        }
    },
    "ignore": [
        "lm_head",
        "re:.*self_attn.*",
        "re:.*shared_experts.*",
        "re:.*mlp\\.(gate|up|gate_up|down)_proj.*",
    ],
}


def multimodal(text: dict[str, Any]) -> dict[str, Any]:
    """The text model's config nested as Kimi K2.5 nests it."""
    return {
        "model_type": "kimi_k25",
        "architectures": ["KimiK25ForConditionalGeneration"],
        "media_placeholder_token_id": 255,
        "vision_config": {"vt_num_hidden_layers": 27},
        "text_config": text,
    }


def random_state(config: ModelConfig, seed: int = 0) -> dict[str, Tensor]:
    """Weights that keep activations near 1, norms about 1, correction biases of a few percent."""
    generator = torch.Generator().manual_seed(seed)
    state: dict[str, Tensor] = {}
    for name, shape in expected_tensors(config).items():
        noise = torch.randn(shape, generator=generator)
        if name.endswith("norm.weight"):
            state[name] = 1 + 0.2 * noise
        elif name.endswith("bias"):
            state[name] = 0.05 * noise
        else:
            state[name] = noise if "embed" in name else noise / shape[1] ** 0.5
    return state


def tiny_checkpoint(path: Path, seed: int = 0, shards: int = 2, **changes: Any) -> Path:
    """The folder of a checkpoint of `tiny_config(**changes)` with the weights of this seed."""
    return written(path, tiny_config(**changes), seed, shards)


def written(path: Path, raw: dict[str, Any], seed: int = 0, shards: int = 2) -> Path:
    """The folder of a checkpoint of this config with the weights of this seed."""
    write_checkpoint(path, raw, random_state(ModelConfig.from_dict(raw), seed), shards)
    return path


def transformers_config(raw: dict[str, Any]) -> Any:
    """The same model for transformers: fp32, everything eager, no quantisation."""
    from bench.speed.deepseek_v3 import deepseek_config

    return deepseek_config(raw, "eager", experts_implementation="eager")


def transformers_model(checkpoint: Checkpoint) -> Any:
    """transformers' causal language model with the checkpoint's weights, everything eager."""
    from bench.speed.deepseek_v3 import deepseek_model

    return deepseek_model(checkpoint, "eager", experts_implementation="eager")
