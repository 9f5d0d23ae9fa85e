"""A small latent cache whose rows follow from the tokens, as a model's do.

So a row that lies in the wrong place, or was taken from another prefix, is seen by its values.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from graphs.contract.tensorfile import DTYPES, Array
from runtime.cache.errors import CacheError
from runtime.cache.kv_cache import LatentCache
from runtime.devices.base import Buffer, Device

LAYERS, WIDTH = 2, 6
FP32, BF16 = DTYPES["float"][1], DTYPES["bfloat16"][1]
TYPES = {"fp32": FP32, "bf16": BF16}

_random = np.random.default_rng(5)
BY_POSITION = _random.integers(1, 2**62, 4096, np.uint64)
BY_VALUE = _random.integers(1, 2**62, (LAYERS, 1, WIDTH), np.uint64) * 2 + 1
TEXTS = [  # the first three begin alike
    [0] * 40 + [1] * 460,
    [0] * 40 + [2] * 460,
    [0] * 100 + [3] * 400,
    *([token] * 500 for token in range(4, 10)),
]


def make_cache(device: Device, rows: int = 256, dtype: np.dtype = FP32) -> LatentCache:
    return LatentCache(device, LAYERS, rows, WIDTH, dtype)


def rows_of(tokens: Sequence[int], dtype: np.dtype[Any]) -> Array:
    """[layers, n, W]: whole numbers that both types hold, each of all tokens up to its own."""
    steps = (np.array(tokens, np.uint64) + np.uint64(1)) * BY_POSITION[: len(tokens)]
    mixed = np.cumsum(steps, dtype=np.uint64)[None, :, None] * BY_VALUE
    whole: Array = ((mixed >> np.uint64(56)).astype(np.int64) - 128).astype(dtype)
    return whole


def staged(cache: LatentCache, first: int, tokens: Sequence[Sequence[int]]) -> Array:
    """[layers, B, S, W]; padding is NaN."""
    shape = (LAYERS, len(tokens), max(map(len, tokens)) + 1, WIDTH)
    rows = np.full(shape, np.nan).astype(cache.dtype)
    for b, new in enumerate(tokens):
        before = cache.tokens(cache.handles[first + b])
        rows[:, b, : len(new)] = rows_of([*before, *new], cache.dtype)[:, len(before) :]
    return rows


def put(cache: LatentCache, rows: Array) -> Buffer:
    buffer = cache.device.zeros(rows.shape, rows.dtype)
    cache.device.write(buffer, rows)
    return buffer


def append(cache: LatentCache, first: int, *tokens: Sequence[int]) -> None:
    """A step that succeeds."""
    cache.reserve(first, [len(new) for new in tokens])
    cache.commit(first, put(cache, staged(cache, first, tokens)), tokens)


def read(cache: LatentCache, first: int, count: int) -> Array:
    """[layers, count, L, W]"""
    return np.stack([cache.device.read(cache.context(i, first, count)) for i in range(LAYERS)])


def inactive(cache: LatentCache) -> list[list[int]]:
    """Least recently used first."""
    return [list(kept.tokens) for kept in cache.slots.inactive.sequences]


def expect_contents(cache: LatentCache) -> None:
    """Of every sequence, alone and all together, and of the inactive ones, in all layers."""
    cache.check()
    count, everything = len(cache.handles), cache.device.read(cache.rows)
    together = read(cache, 0, count) if count > 1 else None
    for slot, handle in enumerate(cache.handles):
        expected = rows_of(cache.tokens(handle), cache.dtype)
        assert np.array_equal(read(cache, slot, 1)[:, 0], expected), f"slot {slot}, alone"
        if together is not None:
            found = together[:, slot, : cache.length(handle)]
            assert np.array_equal(found, expected), f"slot {slot} of {count}"
    for kept in cache.slots.inactive.sequences:
        found = everything[:, kept.start : kept.start + len(kept.tokens)]
        assert np.array_equal(found, rows_of(kept.tokens, cache.dtype)), f"row {kept.start}"


@contextmanager
def unchanged(cache: LatentCache, error: type[CacheError], match: str = ".") -> Iterator[None]:
    """The error is raised, and nothing is other than before."""

    def everything() -> tuple[object, ...]:
        tokens = [cache.tokens(handle) for handle in cache.handles]
        starts = [kept.start for kept in cache.slots.inactive.sequences]
        rows = cache.device.read(cache.rows).tobytes()
        return cache.handles, tokens, inactive(cache), starts, cache.stats, rows

    before = everything()
    with pytest.raises(error, match=match):
        yield
    assert everything() == before


def run(cache: LatentCache, *tokens: Sequence[int]) -> list[int]:
    """Handles of new sequences, each with these tokens cached."""
    handles = []
    for prompt in tokens:
        handles.append(cache.allocate())
        append(cache, len(cache.handles) - 1, prompt)
    return handles
