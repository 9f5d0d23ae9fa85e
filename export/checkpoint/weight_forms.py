"""The forms in which a checkpoint may store a weight, and the tensors of each.

- 16 or 32 bits: one tensor;
- block FP8: e4m3 and a grid of scales (`_scale_inv`), for linear layers, where the config says so;
- grouped INT4: `_packed`, `_scale` and `_shape`, for routed experts, where the config says so.
"""

from collections.abc import Mapping

import torch

from export.checkpoint.block_fp8 import grid_shape
from export.checkpoint.group_int4 import packed_shape, scale_shape
from export.checkpoint.shards import CheckpointError, Stored
from export.checkpoint.tensor_names import is_linear, is_routed
from graphs.contract.config import ModelConfig
from graphs.contract.quantization import Int4Groups

SCALE_SUFFIX = "_scale_inv"  # block FP8
PACKED, GROUP_SCALE, SHAPE = "_packed", "_scale", "_shape"  # grouped INT4
WIDE = (torch.bfloat16, torch.float16, torch.float32)


def companions(name: str) -> tuple[str, ...]:
    """Names of the tensors that may accompany or replace a weight."""
    fp8 = (SCALE_SUFFIX,) if is_linear(name) else ()
    int4 = (PACKED, GROUP_SCALE, SHAPE) if is_routed(name) else ()
    return tuple(name + suffix for suffix in (*fp8, *int4))


def check_weight(
    name: str, shape: tuple[int, ...], stored: Mapping[str, Stored], config: ModelConfig
) -> None:
    """Check a weight's type, shape and companions. Raises CheckpointError."""
    forms = [n for n in (name, name + PACKED) if n in stored]
    if len(forms) == 2:
        raise CheckpointError(f"{name}: expected one stored form, got {' and '.join(forms)}")
    if forms[0] != name:
        _check_int4(name, shape, stored, config)
    elif stored[name].dtype == torch.float8_e4m3fn:
        _check_fp8(name, shape, stored, config)
    else:
        _require(stored, name, shape, WIDE, "bf16, fp16, fp32 or float8_e4m3fn")
        if name + SCALE_SUFFIX in stored:
            raise CheckpointError(
                f"{name}: expected float8_e4m3fn, since {name + SCALE_SUFFIX} is its scale grid, "
                f"got {stored[name].dtype}"
            )


def _check_fp8(
    name: str, shape: tuple[int, ...], stored: Mapping[str, Stored], config: ModelConfig
) -> None:
    block_size = config.weight_block_size
    if block_size is None:
        raise CheckpointError(
            f"{name}: expected 16 or 32 bits, since config.json has no quantization_config with "
            f"quant_method 'fp8', got FP8 in {stored[name].shard}"
        )
    if not is_linear(name):
        raise CheckpointError(
            f"{name}: expected 16 or 32 bits, since it is no linear layer, got FP8 in "
            f"{stored[name].shard}"
        )
    _require(stored, name, shape, (torch.float8_e4m3fn,), "float8_e4m3fn")
    _require(
        stored,
        name + SCALE_SUFFIX,
        grid_shape(shape, block_size),
        (torch.float32, torch.float8_e8m0fnu),
        f"fp32 or float8_e8m0fnu, the scale grid of {shape} with weight_block_size "
        f"{block_size[0]}×{block_size[1]}",
    )


def _check_int4(
    name: str, shape: tuple[int, ...], stored: Mapping[str, Stored], config: ModelConfig
) -> None:
    int4 = config.quantization
    shard = stored[name + PACKED].shard
    if not isinstance(int4, Int4Groups):
        raise CheckpointError(
            f"{name}: expected 16 or 32 bits, since config.json has no quantization_config with "
            f"quant_method 'compressed-tensors', got INT4 in {shard}"
        )
    if not is_routed(name):
        raise CheckpointError(
            f"{name}: expected 16 or 32 bits, since it is no routed expert, got INT4 in {shard}"
        )
    weight = f"for a {shape} weight in groups of {int4.group_size}"
    _require(stored, name + PACKED, packed_shape(shape), (torch.int32,), f"int32 {weight}")
    scales = scale_shape(shape, int4.group_size)
    _require(stored, name + GROUP_SCALE, scales, WIDE, f"bf16, fp16 or fp32 {weight}")
    _require(stored, name + SHAPE, (2,), (torch.int32, torch.int64), "int32 or int64")


def _require(
    stored: Mapping[str, Stored],
    name: str,
    shape: tuple[int, ...],
    dtypes: tuple[torch.dtype, ...],
    expected: str,
) -> None:
    tensor = stored.get(name)
    if tensor is None:
        folder = next(iter(stored.values())).shard.parent
        raise CheckpointError(f"{folder}: tensor {name} is missing; complete the download")
    if tensor.dtype not in dtypes:
        raise CheckpointError(f"{name}: expected {expected}, got {tensor.dtype} in {tensor.shard}")
    if tensor.shape != shape:
        raise CheckpointError(
            f"{name}: expected shape {shape} from config.json ({expected}), got {tensor.shape} in "
            f"{tensor.shard}"
        )
