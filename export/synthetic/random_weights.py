"""Random bytes of a stored tensor: finite, of a known deviation, and drawn at 1 GB/s.

- e4m3: uniform bytes, except the two that are NaN;
- INT4: uniform nibbles, except the one that stands for −8, which published weights do not use;
- scales of either, one per scale block or weight group: uniform from half to one and a half of
  their centre;
- 16 and 32 bits: uniform values of an interval.

A tensor is drawn in pieces of 256 KB, which stay in the processor's cache.
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
SCALE_SPREAD = 0.5  # of a scale, relative to its centre

Draw = Callable[[Array], Array]  # random 64-bit words → as many bytes of a tensor


def random_bytes(seed: int, name: str, size: int, draw: Draw) -> Iterator[Array]:
    """Draw a tensor's `size` bytes in pieces; they depend on seed, name and `draw` alone."""
    name_seed = int.from_bytes(hashlib.sha256(name.encode()).digest(), "little")
    generator = np.random.SFC64(np.random.SeedSequence([seed, name_seed]))
    for first in range(0, size, 8 * PIECE_WORDS):
        remaining = size - first
        words: Array = generator.random_raw(min(PIECE_WORDS, math.ceil(remaining / 8)))
        yield draw(words)[:remaining]


def e4m3_bytes(words: Array) -> Array:
    """Uniform bytes, but each NaN (0x7F, 0xFF) becomes the byte below it: ±448."""
    codes = words.view(np.uint8)
    codes -= (codes & 0x7F) == 0x7F
    return codes


def nibbles(words: Array) -> Array:
    """Uniform nibbles, but 0, which stands for −8, becomes the nibble that stands for 0."""
    nonzero = words | (words >> np.uint64(1))
    nonzero |= nonzero >> np.uint64(2)  # the lowest bit of a nibble: whether any of its bits is set
    ones = np.uint64(0x1111_1111_1111_1111)
    words |= (~nonzero & ones) * np.uint64(ZERO)
    return words.view(np.uint8)


def uniform(dtype: torch.dtype, centre: float, spread: float) -> Draw:
    """bf16 or fp32 values, uniform over centre ± spread."""
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


def uniform_rms(centre: float, spread: float) -> float:
    """Root mean square of the values that `uniform` draws."""
    return math.sqrt(centre**2 + spread**2 / 3)


def scales(rms: float, dtype: torch.dtype = torch.float32) -> Draw:
    """Independent scales of this root mean square."""
    centre = rms / uniform_rms(1, SCALE_SPREAD)
    return uniform(dtype, centre, SCALE_SPREAD * centre)


def to_powers_of_two(draw: Draw) -> Draw:
    """Round drawn fp32 values, all above 0, to the nearest power of two."""

    def rounded(words: Array) -> Array:
        values: Array = np.exp2(np.log2(draw(words).view(np.float32)).round())
        return values.view(np.uint8)

    return rounded


def _e4m3_deviation() -> float:
    codes = e4m3_bytes(np.arange(256, dtype=np.uint8).view(np.uint64))
    values = torch.from_numpy(codes).view(E4M3).to(torch.float32)
    return float(values.square().mean().sqrt())


# Root mean squares of e4m3_bytes, and of nibbles: −7 … 7, and 0 once more.
E4M3_DEVIATION = _e4m3_deviation()
NIBBLE_DEVIATION = math.sqrt(2 * sum(q * q for q in range(1, 8)) / 16)
