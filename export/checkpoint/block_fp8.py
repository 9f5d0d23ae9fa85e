"""The checkpoint's block FP8: e4m3 weights, with one fp32 scale per `weight_block_size` block.

Three operations: encode (to write checkpoints), decode (for the reference), and repack to one scale
per output channel (for the engines, since TensorRT expands block-scaled weights to 16 bits at every
run). The scale grid has ceil(rows/block) × ceil(columns/block) entries, so a matrix may end with
ragged scale blocks: 576 rows have 5 scale rows, the last for 64 rows. Scale blocks are not the
model's transformer blocks.
"""

import math
from dataclasses import dataclass

import numba
import torch
from torch import Tensor

from graphs.contract.tensorfile import Array

E4M3 = torch.float8_e4m3fn
E4M3_MAX = 448.0


@dataclass(frozen=True)
class BlockFP8:
    """weight e4m3 [out, in], scale fp32 [ceil(out/a), ceil(in/b)], block_size (a, b)."""

    weight: Tensor
    scale: Tensor
    block_size: tuple[int, int]


@dataclass(frozen=True)
class ChannelFP8:
    """weight e4m3 [out, in] as engines read it, scale fp32 [out]."""

    weight: Tensor
    scale: Tensor

    def decode(self) -> Tensor:
        """fp32 [out, in]."""
        return self.weight.to(torch.float32) * self.scale[:, None]


def grid_shape(shape: tuple[int, ...], block_size: tuple[int, int]) -> tuple[int, int]:
    return math.ceil(shape[0] / block_size[0]), math.ceil(shape[1] / block_size[1])


def expand_scale(scale: Tensor, shape: tuple[int, ...], block_size: tuple[int, int]) -> Tensor:
    """One scale per weight, [out, in]: the grid repeated over its scale blocks and cut to shape."""
    rows = scale.repeat_interleave(block_size[0], dim=0)[: shape[0]]
    return rows.repeat_interleave(block_size[1], dim=1)[:, : shape[1]]


def encode(weight: Tensor, block_size: tuple[int, int]) -> BlockFP8:
    """Round a 2-D weight to e4m3, each scale block scaled so that its largest magnitude is 448.

    Raises ValueError where the weight is not finite: torch's cast would saturate infinity silently.
    """
    if not torch.isfinite(weight).all():
        raise ValueError("weight: expected finite values, got NaN or infinity")
    weight, shape = weight.to(torch.float32), tuple(weight.shape)
    (rows, columns), (height, width) = grid_shape(shape, block_size), block_size
    padded = torch.zeros(rows * height, columns * width)
    padded[: shape[0], : shape[1]] = weight
    peaks = padded.view(rows, height, columns, width).abs().amax(dim=(1, 3))
    scale = torch.where(peaks > 0, peaks / E4M3_MAX, 1.0)
    codes = (weight / expand_scale(scale, shape, block_size)).to(E4M3)
    return BlockFP8(codes, scale, block_size)


def decode(weight: BlockFP8) -> Tensor:
    """fp32 [out, in]."""
    values, (height, width) = weight.weight.to(torch.float32), weight.block_size
    for i, row in enumerate(weight.scale):
        values[i * height : (i + 1) * height] *= row.repeat_interleave(width)[: values.shape[1]]
    return values


def to_channels(weight: BlockFP8) -> ChannelFP8:
    """Repack to one scale per output channel: the largest scale in its row of scale blocks.

    Scale blocks that have that scale keep their bytes; each other one is re-encoded through a table
    of 256 bytes, so a weight is rounded at most once more and never decoded to a wide type. A block
    of zeros may have any scale, so its scale is ignored, and it keeps its bytes.
    """
    source = weight.weight.view(torch.uint8)
    largest = torch.stack([_largest_scale(weight, i) for i in range(len(weight.scale))])[:, None]
    ratio = torch.where(weight.scale < largest, weight.scale / largest, 1.0)
    values = torch.arange(256, dtype=torch.uint8).view(E4M3).to(torch.float32)
    tables = (values * ratio[..., None]).to(E4M3).view(torch.uint8)
    codes = torch.empty_like(source)
    _recode(source.numpy(), tables.numpy(), codes.numpy(), *weight.block_size)
    scale = largest.flatten().repeat_interleave(weight.block_size[0])[: len(source)]
    return ChannelFP8(codes.view(E4M3), scale)


def _recode_blocks(source: Array, tables: Array, target: Array, rows: int, columns: int) -> None:
    """Recode each byte by its scale block's table."""
    for r in range(source.shape[0]):
        for j in range(tables.shape[1]):
            table = tables[r // rows, j]
            for c in range(j * columns, min((j + 1) * columns, source.shape[1])):
                target[r, c] = table[source[r, c]]


# Compiled, since numpy's take is several times slower; releases the interpreter's lock for other
# workers.
_recode = numba.njit(nogil=True, cache=True)(_recode_blocks)


def _largest_scale(weight: BlockFP8, i: int) -> Tensor:
    """The largest scale in row i of the grid, blocks of zeros left out unless there is no other."""
    for j in weight.scale[i].argsort(descending=True).tolist():
        if weight.weight[_area(weight.block_size, i, j)].view(torch.uint8).bitwise_and(0x7F).any():
            return weight.scale[i, j]
    return weight.scale[i].amax()


def _area(block_size: tuple[int, int], i: int, j: int) -> tuple[slice, slice]:
    """Rows and columns of the scale block at i, j of the grid; slicing cuts a ragged one."""
    rows, columns = block_size
    return slice(i * rows, (i + 1) * rows), slice(j * columns, (j + 1) * columns)


def channels_from_wide(weight: Tensor) -> ChannelFP8:
    """Quantise a 16- or 32-bit [out, in] weight, each row scaled so that its peak is 448."""
    wide = weight.to(torch.float32)
    peaks = wide.abs().amax(dim=1)
    scale = torch.where(peaks > 0, peaks / E4M3_MAX, 1.0)
    return ChannelFP8((wide / scale[:, None]).to(E4M3), scale)
