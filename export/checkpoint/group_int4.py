"""The checkpoint's grouped INT4 (Kimi K2-Thinking, K2.5): routed experts in 4 bits and a scale.

A weight [out, in] is three tensors: `weight_packed` int32 [out, in/8], eight nibbles per word with
the first input in the lowest bits; `weight_scale` [out, in/group_size] in 16 or 32 bits;
`weight_shape` [2]. A nibble n stands for (n − 8) times the scale of its weight group, a run of
`group_size` inputs (the symmetric pack-quantized form of compressed-tensors). Ragged last words and
groups are padded.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

NIBBLES = 8  # per int32 word
ZERO = 8  # the nibble that stands for 0


@dataclass(frozen=True)
class GroupInt4:
    """packed int32 [out, ceil(in/8)], scale [out, ceil(in/group_size)], shape (out, in)."""

    packed: Tensor
    scale: Tensor
    shape: tuple[int, int]
    group_size: int


def packed_shape(shape: tuple[int, ...]) -> tuple[int, int]:
    return shape[0], math.ceil(shape[1] / NIBBLES)


def scale_shape(shape: tuple[int, ...], group_size: int) -> tuple[int, int]:
    return shape[0], math.ceil(shape[1] / group_size)


def decode_int4(weight: GroupInt4) -> Tensor:
    """fp32 [out, in]."""
    octets = weight.packed.contiguous().view(torch.uint8)  # little-endian: the low nibbles first
    nibbles = torch.stack([octets & 15, octets >> 4], dim=-1).flatten(1)
    scale = weight.scale.to(torch.float32).repeat_interleave(weight.group_size, dim=1)
    columns = weight.shape[1]
    return (nibbles[:, :columns].to(torch.float32) - ZERO) * scale[:, :columns]


def encode_int4(weight: Tensor, group_size: int) -> GroupInt4:
    """Round a 2-D weight to −7 … 7 times the bf16 scale of its weight group.

    Raises ValueError where the weight is not finite.
    """
    if not torch.isfinite(weight).all():
        raise ValueError("weight: expected finite values, got NaN or infinity")
    rows, columns = weight.shape
    count = math.ceil(columns / group_size)
    padded = torch.zeros(rows, count * group_size)
    padded[:, :columns] = weight
    groups = padded.view(rows, count, group_size)
    peaks = groups.abs().amax(dim=2)
    scale = torch.where(peaks > 0, peaks / 7, 1.0).to(torch.bfloat16)
    values = (groups / scale.to(torch.float32)[..., None]).round().clamp(-8, 7).view(rows, -1)
    words = math.ceil(columns / NIBBLES)
    nibbles = torch.zeros(rows, words * NIBBLES, dtype=torch.int64)
    nibbles[:, :columns] = values[:, :columns].to(torch.int64) + ZERO
    shifts = 4 * torch.arange(NIBBLES)
    wide = (nibbles.view(rows, words, NIBBLES) << shifts).sum(dim=2)
    packed = torch.where(wide >= 2**31, wide - 2**32, wide).to(torch.int32)
    return GroupInt4(packed, scale, (rows, columns), group_size)
