"""Write a model in its family's on-disk format: config, index, and shards in bf16, FP8 or INT4."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from export.checkpoint.block_fp8 import encode
from export.checkpoint.group_int4 import encode_int4
from export.checkpoint.open import require_finite
from export.checkpoint.shards import INDEX, CheckpointError
from export.checkpoint.tensor_names import expected_tensors, is_linear, is_routed
from export.checkpoint.weight_forms import GROUP_SCALE, PACKED, SCALE_SUFFIX, SHAPE
from graphs.contract.config import TEXT_PREFIX, ModelConfig
from graphs.contract.files import replacing, write_text
from graphs.contract.quantization import FP8Blocks, Int4Groups


def write_checkpoint(
    folder: Path, raw_config: Mapping[str, Any], state: Mapping[str, Tensor], shards: int = 2
) -> None:
    """Write `state` (checkpoint names, any float dtype) as a checkpoint of `raw_config`.

    The config's quantisation makes linear layers block FP8, or routed experts grouped INT4. Gate
    weights, norms, embedding and head are bf16, the correction bias fp32. Raises CheckpointError
    where a name or shape differs from the config or a value is not finite, before anything is
    written.
    """
    config = ModelConfig.from_dict(raw_config)
    _check(state, expected_tensors(config))
    folder.mkdir(parents=True, exist_ok=True)
    weight_map: dict[str, str] = {}
    total = 0
    names = sorted(state)
    for i in range(shards):
        file = f"model-{i + 1:05d}-of-{shards:06d}.safetensors"
        tensors: dict[str, Tensor] = {}
        for name in names[i * len(names) // shards : (i + 1) * len(names) // shards]:
            tensors |= _stored(name, state[name], config)
        if "text_config" in raw_config:
            tensors = {TEXT_PREFIX + name: tensor for name, tensor in tensors.items()}
        with replacing(folder / file) as temporary:
            save_file(tensors, temporary, metadata={"format": "pt"})
            temporary.chmod(0o644)  # safetensors writes files that only their owner may read
        weight_map |= dict.fromkeys(tensors, file)
        total += sum(t.numel() * t.element_size() for t in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    write_indented_json(folder / INDEX, index)
    write_indented_json(folder / "config.json", raw_config)


def _check(state: Mapping[str, Tensor], expected: Mapping[str, tuple[int, ...]]) -> None:
    shapes = {name: tuple(tensor.shape) for name, tensor in state.items()}
    if shapes != expected:
        name, _ = min(shapes.items() ^ expected.items())
        raise CheckpointError(
            f"{name}: expected shape {expected.get(name)} from config.json, got {shapes.get(name)} "
            "(None: no such tensor)"
        )
    for name, tensor in state.items():
        require_finite(name, tensor)


def write_indented_json(path: Path, value: Any) -> None:
    """Write JSON as checkpoints have it: indented by two, numbers in full, by a rename."""
    write_text(path, json.dumps(value, indent=2) + "\n")


def _stored(name: str, tensor: Tensor, config: ModelConfig) -> dict[str, Tensor]:
    tensor = tensor.detach()
    if name.endswith("e_score_correction_bias"):
        return {name: tensor.to(torch.float32).contiguous()}
    match config.quantization:
        case FP8Blocks(block=block_size) if is_linear(name):
            blocks = encode(tensor, block_size)
            return {name: blocks.weight, name + SCALE_SUFFIX: blocks.scale}
        case Int4Groups(group_size=group_size) if is_routed(name):
            groups = encode_int4(tensor, group_size)
            shape = torch.tensor(groups.shape, dtype=torch.int32)
            parts = {PACKED: groups.packed, GROUP_SCALE: groups.scale, SHAPE: shape}
            return {name + suffix: part for suffix, part in parts.items()}
    return {name: tensor.to(torch.bfloat16).contiguous()}
