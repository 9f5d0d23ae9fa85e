"""Random bytes of a stored tensor: finite, of a known deviation, and drawn at 1 GB/s.

- e4m3: bytes drawn evenly, but for the two that are NaN;
- INT4: nibbles drawn evenly, but for the one that stands for −8, which published weights do not
  use;
- multipliers of either, one a block or group, within half and one and a half of their centre;
- 16 and 32 bits: values drawn evenly from an interval.

A tensor is drawn in pieces of 256 KB, so that they stay in the processor's cache.
"""

import hashlib
import math
from collections.abc import Callable, Iterator

import numpy as np
import torch

from export.checkpoint.block_fp8 import E4M3
from export.checkpoint.group_int4 import ZERO
from graphs.contract.tensorfile import Array

PIECE_WORDS = 1 << 15
SCALE_SPREAD = 0.5  # of a multiplier, relative to its centre

Draw = Callable[[Array], Array]  # random 64-bit words → as many bytes of a tensor


def random_bytes(seed: int, name: str, size: int, draw: Draw) -> Iterator[Array]:
    """A tensor's `size` bytes in pieces: the same for the same seed, name and way to draw."""
    own = int.from_bytes(hashlib.sha256(name.encode()).digest(), "little")
    generator = np.random.SFC64(np.random.SeedSequence([seed, own]))
    for first in range(0, size, 8 * PIECE_WORDS):
        rest = size - first
        words: Array = generator.random_raw(min(PIECE_WORDS, math.ceil(rest / 8)))
        yield draw(words)[:rest]


def e4m3_bytes(words: Array) -> Array:
    """Even but for NaN, 0x7F and 0xFF, which become the bytes below them: ±448."""
    codes = words.view(np.uint8)
    codes -= (codes & 0x7F) == 0x7F
    return codes


def nibbles(words: Array) -> Array:
    """Even but for 0, which stands for −8 and becomes the nibble that stands for 0."""
    used = words | (words >> np.uint64(1))
    used |= used >> np.uint64(2)  # the lowest bit of a nibble: whether any of its bits is set
    ones = np.uint64(0x1111_1111_1111_1111)
    words |= (~used & ones) * np.uint64(ZERO)
    return words.view(np.uint8)


def even(dtype: torch.dtype, centre: float, spread: float) -> Draw:
    """bf16 or fp32 values drawn evenly from centre ± spread."""
    carrier = np.int16 if dtype.itemsize == 2 else np.int32
    step = spread / -float(np.iinfo(carrier).min)

    def draw(words: Array) -> Array:
        values: Array = words.view(carrier).astype(np.float32)
        values *= np.float32(step)
        values += np.float32(centre)
        bits: Array = values.view(np.uint32)
        if dtype == torch.bfloat16:  # the upper half of an fp32, to nearest
            bits += np.uint32(0x8000)
            bits = (bits >> np.uint32(16)).astype(np.uint16)
        return bits.view(np.uint8)

    return draw


def even_rms(centre: float, spread: float) -> float:
    """Root mean square of what `even` draws."""
    return math.sqrt(centre**2 + spread**2 / 3)


def scales(rms: float, dtype: torch.dtype = torch.float32) -> Draw:
    """Multipliers of this root mean square, each drawn for itself."""
    centre = rms / even_rms(1, SCALE_SPREAD)
    return even(dtype, centre, SCALE_SPREAD * centre)


def to_powers_of_two(draw: Draw) -> Draw:
    """The nearest, of fp32 values above 0."""

    def rounded(words: Array) -> Array:
        values: Array = np.exp2(np.log2(draw(words).view(np.float32)).round())
        return values.view(np.uint8)

    return rounded


def _e4m3_deviation() -> float:
    codes = e4m3_bytes(np.arange(256, dtype=np.uint8).view(np.uint64))
    values = torch.from_numpy(codes).view(E4M3).to(torch.float32)
    return float(values.square().mean().sqrt())


# Root mean squares of what `e4m3_bytes` draws, and `nibbles`: −7 … 7, and 0 once more.
E4M3_DEVIATION = _e4m3_deviation()
NIBBLE_DEVIATION = math.sqrt(2 * sum(q * q for q in range(1, 8)) / 16)
