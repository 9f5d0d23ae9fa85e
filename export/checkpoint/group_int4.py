"""The checkpoint's grouped INT4 (Kimi K2-Thinking, K2.5): routed experts in 4 bits and a scale.

A weight [out, in] is three tensors: `weight_packed` int32 [out, in/8], eight nibbles a word with
the first input in the lowest bits; `weight_scale` [out, in/group] in 16 or 32 bits; `weight_shape`
[2]. A nibble n stands for (n − 8) · scale of its group of inputs (the symmetric pack-quantized form
of compressed-tensors). Ragged last words and groups are padded.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

NIBBLES = 8  # per int32 word
ZERO = 8  # the nibble that stands for 0


@dataclass(frozen=True)
class GroupInt4:
    """packed int32 [out, ceil(in/8)], scale [out, ceil(in/group)] and the weight's own shape."""

    packed: Tensor
    scale: Tensor
    shape: tuple[int, int]
    group: int


def packed_shape(shape: tuple[int, ...]) -> tuple[int, int]:
    return shape[0], math.ceil(shape[1] / NIBBLES)


def scale_shape(shape: tuple[int, ...], group: int) -> tuple[int, int]:
    return shape[0], math.ceil(shape[1] / group)


def decode_int4(weight: GroupInt4) -> Tensor:
    """fp32 [out, in]."""
    octets = weight.packed.contiguous().view(torch.uint8)  # little-endian: the low nibbles first
    nibbles = torch.stack([octets & 15, octets >> 4], dim=-1).flatten(1)
    scale = weight.scale.to(torch.float32).repeat_interleave(weight.group, dim=1)
    columns = weight.shape[1]
    return (nibbles[:, :columns].to(torch.float32) - ZERO) * scale[:, :columns]


def encode_int4(weight: Tensor, group: int) -> GroupInt4:
    """Round a 2-D weight to −7 … 7 times the scale of its group, a bf16.

    Raises ValueError where the weight is not finite.
    """
    if not torch.isfinite(weight).all():
        raise ValueError("a weight to be encoded must be finite")
    rows, columns = weight.shape
    groups = math.ceil(columns / group)
    padded = torch.zeros(rows, groups * group)
    padded[:, :columns] = weight
    blocks = padded.view(rows, groups, group)
    peaks = blocks.abs().amax(dim=2)
    scale = torch.where(peaks > 0, peaks / 7, 1.0).to(torch.bfloat16)
    values = (blocks / scale.to(torch.float32)[..., None]).round().clamp(-8, 7).view(rows, -1)
    words = math.ceil(columns / NIBBLES)
    nibbles = torch.zeros(rows, words * NIBBLES, dtype=torch.int64)
    nibbles[:, :columns] = values[:, :columns].to(torch.int64) + ZERO
    shifts = 4 * torch.arange(NIBBLES)
    wide = (nibbles.view(rows, words, NIBBLES) << shifts).sum(dim=2)
    packed = torch.where(wide >= 2**31, wide - 2**32, wide).to(torch.int32)
    return GroupInt4(packed, scale, (rows, columns), group)
