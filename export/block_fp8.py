"""The checkpoint's block FP8: e4m3 weights, one fp32 multiplier per `weight_block_size` block.

Three operations: encode (to write checkpoints), decode (for the reference), and repack to one scale
per output channel (for the engines, since TensorRT expands block-scaled weights to 16 bits at every
run). The scale grid always has ceil(rows/block) × ceil(columns/block) entries, so the last block of
a matrix may be ragged: 576 rows have 5 scale rows, the last for 64 rows.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

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
    """weight e4m3 [out, in], scale fp32 [out]: value = weight · scale of its row."""

    weight: Tensor
    scale: Tensor

    def decode(self) -> Tensor:
        return self.weight.to(torch.float32) * self.scale[:, None]


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
    scale = spread(weight.scale, tuple(weight.weight.shape), weight.block)
    return weight.weight.to(torch.float32) * scale


def to_channels(weight: BlockFP8) -> ChannelFP8:
    """One scale per output channel: the largest block scale in its row of blocks.

    Blocks that have that scale keep their bytes; each other block is re-encoded through one table
    of 256 bytes, so a weight is rounded at most once more and never decoded to a wide type. A block
    of zeros may have any scale, so it has no say, and keeps its bytes.
    """
    source = weight.weight.view(torch.uint8)
    packed = source.clone()
    values = torch.arange(256, dtype=torch.uint8).view(E4M3).to(torch.float32)
    largest = torch.stack([_largest_scale(weight, i) for i in range(len(weight.scale))])
    for i, j in (weight.scale < largest[:, None]).nonzero().tolist():
        table = (values * (weight.scale[i, j] / largest[i])).to(E4M3).view(torch.uint8)
        area = _area(weight.block, i, j)
        packed[area] = table[source[area].to(torch.int64)]
    scale = largest.repeat_interleave(weight.block[0])[: source.shape[0]]
    return ChannelFP8(packed.view(E4M3), scale)


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


def channels_from_wide(weight: Tensor) -> ChannelFP8:
    """Quantise a 16- or 32-bit [out, in] weight, each row scaled so that its peak is 448."""
    peaks = weight.to(torch.float32).abs().amax(dim=1)
    scale = torch.where(peaks > 0, peaks / E4M3_MAX, 1.0)
    return ChannelFP8((weight.to(torch.float32) / scale[:, None]).to(E4M3), scale)
