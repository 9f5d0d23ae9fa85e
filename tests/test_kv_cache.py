"""The latent cache against a plain dictionary of sequences, and what it refuses."""

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from graphs.tensorfile import DTYPES, Array
from runtime.kv_cache import CacheError, LatentCache, stride_for

LAYERS, WIDTH = 2, 6
FP32, BF16 = DTYPES["float"][1], DTYPES["bfloat16"][1]


def make_cache(rows: int = 256, dtype: np.dtype = FP32) -> LatentCache:
    return LatentCache(LAYERS, rows, WIDTH, dtype)


def staged(counts: list[int], start: float = 1.0) -> Array:
    shape = (LAYERS, len(counts), max(counts), WIDTH)
    return (start + np.arange(np.prod(shape))).reshape(shape).astype(np.float32)


def append(cache: LatentCache, counts: list[int], rows: Array) -> None:
    cache.reserve(counts)
    cache.commit(0, rows, counts)


class CacheMachine(RuleBasedStateMachine):
    """Random operations on the cache and on a dictionary {handle: rows [layers, n, W]}."""

    def __init__(self) -> None:
        super().__init__()
        self.cache = make_cache(rows=512)
        self.model: dict[int, Array] = {}
        self.written = 0.0

    @rule()
    def allocate(self) -> None:
        fits = (len(self.model) + 1) * self.cache.slots.stride <= self.cache.capacity
        if not fits:
            with pytest.raises(CacheError):
                self.cache.allocate()
            return
        self.model[self.cache.allocate()] = np.zeros((LAYERS, 0, WIDTH), np.float32)

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        handle = data.draw(st.sampled_from(sorted(self.model)))
        self.cache.free(handle)
        del self.model[handle]
        with pytest.raises(CacheError, match=f"sequence {handle}"):
            self.cache.free(handle)

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def step(self, data: st.DataObject) -> None:
        slots = len(self.cache.slots.handles)
        counts = data.draw(st.lists(st.integers(0, 90), min_size=slots, max_size=slots))
        before = dict(zip(self.cache.slots.handles, self.cache.slots.lengths, strict=True))
        try:
            self.cache.reserve(counts)
        except CacheError:
            after = dict(zip(self.cache.slots.handles, self.cache.slots.lengths, strict=True))
            assert after == before
            return
        if max(counts) == 0:
            return
        rows = staged(counts, self.written)
        self.written += rows.size
        self.cache.commit(0, rows, counts)
        for b, handle in enumerate(self.cache.slots.handles):
            new = rows[:, b, : counts[b]]
            self.model[handle] = np.concatenate([self.model[handle], new], axis=1)

    @invariant()
    def same_contents(self) -> None:
        self.cache.check()
        assert sorted(self.cache.slots.handles) == sorted(self.model)
        for slot, handle in enumerate(self.cache.slots.handles):
            for layer in range(LAYERS):
                one = self.cache.context(layer, slot, 1)[0]
                np.testing.assert_array_equal(one, self.model[handle][layer])
        count = len(self.cache.slots.handles)
        if count > 1:
            view = self.cache.context(0, 0, count)
            for slot, handle in enumerate(self.cache.slots.handles):
                length = self.cache.slots.lengths[slot]
                np.testing.assert_array_equal(view[slot, :length], self.model[handle][0])


CacheMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
TestCacheAgainstDictionary = CacheMachine.TestCase


def test_stride_buckets_double_from_64() -> None:
    assert [stride_for(n) for n in (0, 1, 64, 65, 128, 129, 1000)] == [
        64,
        64,
        64,
        128,
        128,
        256,
        1024,
    ]


@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_context_is_contiguous_and_in_place(dtype: np.dtype) -> None:
    """Case 21: a strided view would be copied silently when bound."""
    cache = make_cache(dtype=dtype)
    for _ in range(3):
        cache.allocate()
    append(cache, [2, 5, 9], staged([2, 5, 9]).astype(dtype))
    for first, count in ((0, 3), (1, 1), (1, 2), (2, 1)):
        view = cache.context(1, first, count)
        assert view.flags.c_contiguous
        assert np.shares_memory(view, cache.rows)
    assert cache.context(0, 1, 1).shape == (1, 5, WIDTH)


def test_every_slot_starts_on_256_bytes() -> None:
    cache = LatentCache(3, 512, 144, BF16)
    for _ in range(4):
        cache.allocate()
    cache.reserve([100, 3, 3, 3])
    base = cache.rows.ctypes.data
    for layer in range(3):
        for slot in range(4):
            address = cache.context(layer, slot, 2 if slot < 3 else 1).ctypes.data
            assert (address - base) % 256 == 0


def test_overflow_is_refused_before_anything_moves() -> None:
    """Case 14: capacity 64 rows, 65 asked for."""
    cache = make_cache(rows=64)
    cache.allocate()
    append(cache, [60], staged([60]))
    before = cache.rows.copy()
    with pytest.raises(CacheError, match=r"holds 64 rows.* 1 × 65 = 65"):
        cache.reserve([5])
    np.testing.assert_array_equal(cache.rows, before)
    assert cache.slots.lengths == [60]


def test_one_long_sequence_beside_short_ones_is_refused_with_the_arithmetic() -> None:
    cache = make_cache(rows=512)
    for _ in range(4):
        cache.allocate()
    with pytest.raises(CacheError, match=r"4 sequences of up to 256 rows need 4 × 256 = 1024"):
        cache.reserve([200, 1, 1, 1])
    assert cache.slots.stride == 64


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
def test_a_row_that_is_not_finite_is_refused_for_all_layers(poison: float) -> None:
    """Case 18: it would reach a neighbour as 0 × NaN."""
    cache = make_cache()
    cache.allocate()
    second = cache.allocate()
    rows = staged([3, 3])
    rows[1, 1, 2, 4] = poison
    cache.reserve([3, 3])
    with pytest.raises(CacheError, match=rf"layer 1, sequence {second}.*nothing was committed"):
        cache.commit(0, rows, [3, 3])
    assert cache.slots.lengths == [0, 0]
    assert not cache.rows.any()
    cache.commit(0, rows, [3, 2])  # the poisoned row is padding now, and is left behind
    cache.check()


def test_the_stride_shrinks_when_the_long_sequence_leaves() -> None:
    cache = make_cache(rows=512)
    long, short = cache.allocate(), cache.allocate()
    append(cache, [200, 3], staged([200, 3]))
    assert cache.slots.stride == 256
    expected = cache.context(0, 1, 1).copy()
    cache.free(long)
    assert cache.slots.stride == 64
    np.testing.assert_array_equal(cache.context(0, 0, 1), expected)
    assert cache.length(short) == 3


def test_rows_must_be_a_multiple_of_64() -> None:
    with pytest.raises(ValueError, match="multiple of 64"):
        make_cache(rows=100)
