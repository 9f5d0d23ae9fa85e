"""The forms in which a checkpoint may store a weight, and what each consists of.

A weight is one tensor of 16 or 32 bits; or e4m3 with a grid of scales (`_scale_inv`), where the
config says block FP8 and the weight is a linear layer's; or three tensors (`_packed`, `_scale`,
`_shape`), where the config says grouped INT4 and the weight is a routed expert's.
"""

from collections.abc import Mapping

import torch

from export.checkpoint.block_fp8 import grid_shape
from export.checkpoint.group_int4 import packed_shape, scale_shape
from export.checkpoint.shards import CheckpointError, Stored
from export.checkpoint.tensor_names import is_linear, is_routed
from graphs.contract.config import ModelConfig
from graphs.contract.quantization import Int4Groups

SCALE_SUFFIX = "_scale_inv"  # of block FP8
PACKED, GROUP_SCALE, SHAPE = "_packed", "_scale", "_shape"  # of grouped INT4
WIDE = (torch.bfloat16, torch.float16, torch.float32)


def companions(name: str) -> tuple[str, ...]:
    """Names that may stand beside a weight's or in its place."""
    own = (SCALE_SUFFIX,) if is_linear(name) else ()
    int4 = (PACKED, GROUP_SCALE, SHAPE) if is_routed(name) else ()
    return tuple(name + suffix for suffix in (*own, *int4))


def check_weight(
    name: str, shape: tuple[int, ...], stored: Mapping[str, Stored], config: ModelConfig
) -> None:
    """Types, shapes and companions of an expected weight. Raises CheckpointError."""
    forms = [n for n in (name, name + PACKED) if n in stored]
    if len(forms) == 2:
        raise CheckpointError(f"{forms[0]}: found beside {forms[1]}; one form is expected")
    if forms[0] != name:
        _check_int4(name, shape, stored, config)
    elif stored[name].dtype == torch.float8_e4m3fn:
        _check_fp8(name, shape, stored, config)
    else:
        _require(stored, name, shape, WIDE, "bf16, fp16, fp32 or float8_e4m3fn")
        if name + SCALE_SUFFIX in stored:
            raise CheckpointError(
                f"{name}: {stored[name].dtype} found beside {name + SCALE_SUFFIX}; a "
                "weight with a scale grid must be float8_e4m3fn"
            )


def _check_fp8(
    name: str, shape: tuple[int, ...], stored: Mapping[str, Stored], config: ModelConfig
) -> None:
    block = config.weight_block_size
    if block is None:
        raise CheckpointError(
            f"{name}: FP8 in {stored[name].shard}, but config.json has no "
            "quantization_config with quant_method 'fp8'"
        )
    if not is_linear(name):
        raise CheckpointError(
            f"{name}: FP8 found in {stored[name].shard}, 16 or 32 bits expected for this tensor"
        )
    _require(stored, name, shape, (torch.float8_e4m3fn,), "float8_e4m3fn")
    _require(
        stored,
        name + SCALE_SUFFIX,
        grid_shape(shape, block),
        (torch.float32, torch.float8_e8m0fnu),
        f"fp32 or float8_e8m0fnu, the scale grid of {shape} with weight_block_size "
        f"{block[0]}×{block[1]}",
    )


def _check_int4(
    name: str, shape: tuple[int, ...], stored: Mapping[str, Stored], config: ModelConfig
) -> None:
    int4 = config.quantization
    shard = stored[name + PACKED].shard
    if not isinstance(int4, Int4Groups):
        raise CheckpointError(
            f"{name + PACKED}: INT4 in {shard}, but config.json has no quantization_config "
            "with quant_method 'compressed-tensors'"
        )
    if not is_routed(name):
        raise CheckpointError(
            f"{name + PACKED}: INT4 found in {shard}, 16 or 32 bits expected for this tensor"
        )
    what = f"of a {shape} weight in groups of {int4.group_size}"
    _require(stored, name + PACKED, packed_shape(shape), (torch.int32,), f"int32, {what}")
    scales = scale_shape(shape, int4.group_size)
    _require(stored, name + GROUP_SCALE, scales, WIDE, f"bf16, fp16 or fp32, {what}")
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
        raise CheckpointError(f"{folder}: tensor {name} is missing")
    if tensor.dtype not in dtypes:
        raise CheckpointError(
            f"{name}: {expected} expected, found {tensor.dtype} in {tensor.shard}"
        )
    if tensor.shape != shape:
        raise CheckpointError(
            f"{name}: shape {shape} expected from config.json ({expected}), found "
            f"{tensor.shape} in {tensor.shard}"
        )
