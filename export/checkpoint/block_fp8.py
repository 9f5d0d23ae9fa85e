"""The checkpoint's block FP8: e4m3 weights, one fp32 multiplier per `weight_block_size` block.

Three operations: encode (to write checkpoints), decode (for the reference), and repack to one scale
per output channel (for the engines, since TensorRT expands block-scaled weights to 16 bits at every
run). The scale grid always has ceil(rows/block) × ceil(columns/block) entries, so the last block of
a matrix may be ragged: 576 rows have 5 scale rows, the last for 64 rows.
"""

import math
from dataclasses import dataclass

import numba
import numpy as np
import torch
from torch import Tensor

from graphs.contract.tensorfile import Array

E4M3 = torch.float8_e4m3fn
E4M3_MAX = 448.0


@dataclass(frozen=True)
class BlockFP8:
    """weight e4m3 [out, in], scale fp32 [ceil(out/a), ceil(in/b)], block (a, b)."""

    weight: Tensor
    scale: Tensor
    block: tuple[int, int]


@dataclass(frozen=True)
class ChannelFP8:
    """weight e4m3 [in, out] as engines read it, scale fp32 [out]: value = weight · its scale."""

    weight_KN: Tensor
    scale_N: Tensor

    def decode(self) -> Tensor:
        """fp32 [out, in]."""
        return (self.weight_KN.to(torch.float32) * self.scale_N).T


def grid_shape(shape: tuple[int, ...], block: tuple[int, int]) -> tuple[int, int]:
    return math.ceil(shape[0] / block[0]), math.ceil(shape[1] / block[1])


def spread(scale: Tensor, shape: tuple[int, ...], block: tuple[int, int]) -> Tensor:
    """Each weight's own scale, [out, in]: the grid repeated over its blocks and cut to shape."""
    wide = scale.repeat_interleave(block[0], dim=0)[: shape[0]]
    return wide.repeat_interleave(block[1], dim=1)[:, : shape[1]]


def encode(weight: Tensor, block: tuple[int, int]) -> BlockFP8:
    """Round a 2-D weight to e4m3, each block scaled so that its largest magnitude is 448.

    Raises ValueError where the weight is not finite: torch's cast would saturate infinity silently.
    """
    if not torch.isfinite(weight).all():
        raise ValueError("a weight to be encoded must be finite")
    weight = weight.to(torch.float32)
    rows, columns = grid_shape(tuple(weight.shape), block)
    padded = torch.zeros(rows * block[0], columns * block[1])
    padded[: weight.shape[0], : weight.shape[1]] = weight
    peaks = padded.view(rows, block[0], columns, block[1]).abs().amax(dim=(1, 3))
    scale = torch.where(peaks > 0, peaks / E4M3_MAX, 1.0)
    return BlockFP8((weight / spread(scale, tuple(weight.shape), block)).to(E4M3), scale, block)


def decode(weight: BlockFP8) -> Tensor:
    """fp32 [out, in]."""
    wide = weight.weight.to(torch.float32)
    for i, row in enumerate(weight.scale):
        rows = slice(i * weight.block[0], (i + 1) * weight.block[0])
        wide[rows] *= row.repeat_interleave(weight.block[1])[: wide.shape[1]]
    return wide


def to_channels(weight: BlockFP8, fused_KN: Tensor | None = None, column: int = 0) -> ChannelFP8:
    """One scale per output channel: the largest block scale in its row of blocks.

    Blocks that have that scale keep their bytes; each other block is re-encoded through one table
    of 256 bytes, so a weight is rounded at most once more and never decoded to a wide type. A block
    of zeros may have any scale, so it has no say, and keeps its bytes.

    `fused_KN`: a contiguous uint8 matrix [in, ≥ out] to be written into, from `column` on.
    """
    source = weight.weight.view(torch.uint8)
    fan_out = source.shape[0]
    if fused_KN is None:
        fused_KN = torch.empty(source.shape[::-1], dtype=torch.uint8)
    largest = torch.stack([_largest_scale(weight, i) for i in range(len(weight.scale))])[:, None]
    ratio = torch.where(weight.scale < largest, weight.scale / largest, 1.0)
    values = torch.arange(256, dtype=torch.uint8).view(E4M3).to(torch.float32)
    tables = (values * ratio[..., None]).to(E4M3).view(torch.uint8)
    _recode(source.numpy(), tables.numpy(), fused_KN.numpy(), column, *weight.block)
    scale = largest.flatten().repeat_interleave(weight.block[0])[:fan_out]
    return ChannelFP8(fused_KN[:, column : column + fan_out].view(E4M3), scale)


def _recode_blocks(
    source: Array, tables: Array, target: Array, column: int, rows: int, columns: int
) -> None:
    """target[c, column + r] = what the table of r and c's block gives for source[r, c].

    A block is first copied into a tile of its own. Read down a column of the source, bytes are
    thousands apart and compete for the same few lines of the cache; the tile's rows are padded so
    that they do not. Unsigned indices, since signed ones would be checked for being negative.
    """
    unsigned = numba.uint64
    height, width, padded = unsigned(rows), unsigned(columns), unsigned(columns + 8)
    tile, table = np.empty(height * padded, np.uint8), np.empty(256, np.uint8)
    for i in range(unsigned(tables.shape[0])):
        top = i * height
        tall = min(height, unsigned(source.shape[0]) - top)
        for j in range(unsigned(tables.shape[1])):
            left = j * width
            wide = min(width, unsigned(source.shape[1]) - left)
            table[:] = tables[i, j]
            for r in range(tall):
                for c in range(wide):
                    tile[r * padded + c] = source[top + r, left + c]
            for c in range(wide):
                for r in range(tall):
                    target[left + c, unsigned(column) + top + r] = table[tile[r * padded + c]]


# Compiled, since numpy's take and a transpose need several times as long; releases the interpreter
# for other workers.
_recode = numba.njit(nogil=True, cache=True)(_recode_blocks)


def _largest_scale(weight: BlockFP8, i: int) -> Tensor:
    """Of the blocks in row i of the grid that hold anything but zeros; of all where none does."""
    for j in weight.scale[i].argsort(descending=True).tolist():
        if weight.weight[_area(weight.block, i, j)].view(torch.uint8).bitwise_and(0x7F).any():
            return weight.scale[i, j]
    return weight.scale[i].amax()


def _area(block: tuple[int, int], i: int, j: int) -> tuple[slice, slice]:
    """Rows and columns of the block at i, j of the grid; slicing cuts what is ragged."""
    rows, columns = block
    return slice(i * rows, (i + 1) * rows), slice(j * columns, (j + 1) * columns)


def channels_from_wide(
    weight: Tensor, fused_KN: Tensor | None = None, column: int = 0
) -> ChannelFP8:
    """Quantise a 16- or 32-bit [out, in] weight, each row scaled so that its peak is 448.

    `fused_KN`: a uint8 matrix [in, ≥ out] to be written into, from `column` on.
    """
    wide = weight.to(torch.float32)
    peaks = wide.abs().amax(dim=1)
    scale = torch.where(peaks > 0, peaks / E4M3_MAX, 1.0)
    codes = (wide / scale[:, None]).to(E4M3).view(torch.uint8)
    if fused_KN is None:
        fused_KN = torch.empty(codes.shape[::-1], dtype=torch.uint8)
    target = fused_KN[:, column : column + len(codes)].copy_(codes.T)
    return ChannelFP8(target.view(E4M3), scale)
