"""What the latent cache does and refuses, on every device."""

import itertools
from array import array
from collections.abc import Callable
from time import perf_counter

import numpy as np
import pytest

from runtime.cache.errors import CacheError, CacheFullError, NonFiniteError, StaleHandleError
from runtime.cache.kv_cache import LatentCache
from runtime.cache.slots import CacheSlots
from runtime.cache.strides import largest_stride, least_stride, stride_for
from runtime.devices.base import Device
from tests.support.cache_rows import (
    BF16,
    FP32,
    LAYERS,
    TEXTS,
    TYPES,
    WIDTH,
    append,
    expect_contents,
    inactive,
    make_cache,
    put,
    run,
    staged,
    unchanged,
)
from tests.support.doubles.devices import DEVICES, gpu


@pytest.fixture(
    params=[*DEVICES, pytest.param(gpu, marks=pytest.mark.gpu)], ids=lambda make: make.__name__
)
def device(request: pytest.FixtureRequest) -> Device:
    made: Device = request.param()
    return made


def test_strides() -> None:
    assert [stride_for(n) for n in (0, 1, 64, 65, 128, 129, 1000)] == [
        64,
        64,
        64,
        128,
        128,
        256,
        1024,
    ]
    assert [least_stride(1, n) for n in (0, 64, 65, 129, 1000)] == [64, 64, 128, 192, 1024]
    assert [least_stride(2, n) for n in (0, 64, 65, 129, 1000)] == [64, 64, 128, 256, 1024]
    for capacity, count in itertools.product(range(64, 2048, 64), range(2, 32)):
        if count * 64 <= capacity:
            most = largest_stride(capacity, count)
            assert most == stride_for(most) and count * most <= capacity < count * most * 2


@pytest.mark.parametrize("dtype", TYPES.values(), ids=TYPES)
def test_a_context_is_contiguous_and_in_place(device: Device, dtype: np.dtype) -> None:
    """Case 21: a strided view would be copied silently when bound."""
    cache = make_cache(device, dtype=dtype)
    run(cache, TEXTS[0][:2], TEXTS[1][:5], TEXTS[2][:9])
    for layer, (first, count) in itertools.product((0, 1), [(0, 3), (1, 1), (1, 2), (2, 1)]):
        view, row = cache.context(layer, first, count), WIDTH * dtype.itemsize
        start = device.address(cache.rows) + (layer * 256 + first * 64) * row
        assert device.address(view) == start
    assert tuple(cache.context(0, 1, 1).shape) == (1, 5, WIDTH)
    assert tuple(cache.context(0, 1, 2).shape) == (2, 64, WIDTH)
    with pytest.raises(ValueError, match="contiguous"):
        device.address(cache.rows[:, 64:128])


def test_every_slot_starts_on_256_bytes(device: Device) -> None:
    cache = LatentCache(device, 3, 512, 18, BF16)
    for _ in range(4):
        cache.allocate()
    cache.reserve(1, [100])
    for layer, slot in itertools.product(range(3), range(4)):
        assert device.address(cache.context(layer, slot, 1)) % 256 == 0
    with pytest.raises(ValueError, match=r"expected a multiple of 256 bytes, got rows of 17 × 2"):
        LatentCache(device, 3, 512, 17, BF16)


@pytest.mark.parametrize("rows", [0, 63, 100])
def test_rows_must_be_a_multiple_of_64(device: Device, rows: int) -> None:
    with pytest.raises(ValueError, match=f"expected a multiple of 64, got {rows}"):
        make_cache(device, rows)


def test_overflow_is_refused_before_anything_moves(device: Device) -> None:
    """Case 14: 64 rows, 65 tokens."""
    cache = make_cache(device, 64)
    run(cache, TEXTS[0][:60])
    expected = r"holds 64 rows a layer.* longest sequence of 65 rows, is 1 × 128 = 128;"
    with unchanged(cache, CacheFullError, expected):
        cache.reserve(0, [5])
    with unchanged(cache, CacheFullError, r"longest sequence of 60 rows, is 2 × 64 = 128;"):
        cache.allocate()
    append(cache, 0, TEXTS[0][60:64])
    expect_contents(cache)


def test_one_long_sequence_beside_many_short_is_refused_with_the_arithmetic(device: Device) -> None:
    """Case 19: 1 of 10,000 tokens beside 15 of 10, and some 20,000 rows."""
    cache = make_cache(device, 20_032)
    lengths = [10] * 15 + [10_000]
    expected = r"holds 20032 rows .* of 10000 rows, is 16 × 16384 = 262144;"
    with unchanged(cache, CacheFullError, expected):
        cache.require(lengths)
    run(cache, *[[i] * 10 for i in range(16)])
    with unchanged(cache, CacheFullError, expected):
        cache.reserve(15, [9_990])
    cache.require([10] * 15)
    cache.require([10_000])


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
def test_a_row_that_is_not_finite_is_refused_for_all_layers(device: Device, poison: float) -> None:
    """Case 18: it would reach a neighbour as 0 × NaN."""
    cache = make_cache(device)
    _, second = run(cache, [], [])
    tokens = [[1, 2, 3], [4, 5, 6]]
    rows = staged(cache, 0, tokens)
    rows[1, 1, 2, 4] = poison
    cache.reserve(0, [3, 3])
    message = rf"layer 1, sequence {second}: a new cache row holds NaN .*nothing was committed"
    with unchanged(cache, NonFiniteError, message):
        try:
            cache.commit(0, put(cache, rows), tokens)
        except NonFiniteError as e:
            assert (e.layer, e.handle) == (1, second)
            raise
    cache.commit(0, put(cache, rows), [[1, 2, 3], [4, 5]])  # it is padding now
    assert cache.lengths == [3, 2]
    expect_contents(cache)


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        ((LAYERS, 1, 3, WIDTH), FP32),
        ((LAYERS, 3, 3, WIDTH), FP32),
        ((LAYERS + 1, 2, 3, WIDTH), FP32),
        ((LAYERS, 2, 2, WIDTH), FP32),
        ((LAYERS, 2, 3, WIDTH + 1), FP32),
        ((LAYERS, 6, WIDTH), FP32),
        ((LAYERS, 2, 3, WIDTH), BF16),
    ],
)
def test_rows_of_another_shape_or_type_are_refused(
    device: Device, shape: tuple[int, ...], dtype: np.dtype
) -> None:
    cache = make_cache(device)
    run(cache, [1], [2])
    cache.reserve(0, [3, 3])
    with unchanged(cache, CacheError, r"commit: expected float32 \[2, 2, 3, 6\].*, got"):
        cache.commit(0, device.zeros(shape, dtype), [[1, 2, 3], [4]])


def test_slots_that_are_not_in_use_are_refused(device: Device) -> None:
    cache = make_cache(device)
    run(cache, [1], [2])
    rows = device.zeros((LAYERS, 1, 1, WIDTH), FP32)
    for first in (2, -1):
        with unchanged(cache, CacheError, rf"the 2 in use, got 1 from {first} on"):
            cache.commit(first, rows, [[1]])
        with unchanged(cache, CacheError, rf"the 2 in use, got 1 from {first} on"):
            cache.context(0, first, 1)


def test_a_stale_handle_is_told_who_lives(device: Device) -> None:
    cache = make_cache(device, 1024)
    with unchanged(cache, StaleHandleError, r"sequence 1: expected an active one \(none\)"):
        cache.free(1)
    run(cache, *[[1]] * 10)
    cache.free(3)
    with unchanged(cache, StaleHandleError, r"\(1, 2, 10, 4, 5, 6, 7, 8 and 1 more\)"):
        cache.free(3)


def test_slots_are_laid_out_anew_when_the_stride_changes(device: Device) -> None:
    cache = make_cache(device, 1024)
    handles = run(cache, TEXTS[0][:60], TEXTS[1][:61], TEXTS[2][:62])
    for length, moved in ((100, 61 + 62), (200, 61 + 62 + 100 + 62)):
        append(cache, 1, TEXTS[1][cache.lengths[1] : length])
        assert cache.stride == stride_for(length) and cache.lengths == [60, length, 62]
        assert cache.stats.rows_moved == moved
        expect_contents(cache)
    cache.free(handles[1])
    assert cache.stride == 64 and cache.lengths == [60, 62]
    expect_contents(cache)


def test_the_stride_shrinks_only_when_a_quarter_of_it_will_do(device: Device) -> None:
    cache = make_cache(device, 1024)
    long, _ = run(cache, TEXTS[0][:300], TEXTS[1][:3])
    cache.truncate(long, 130)
    moved = cache.stats.rows_moved
    assert cache.stride == 512
    append(cache, 0, TEXTS[0][130:140])
    append(cache, 0, TEXTS[0][140:300])
    assert cache.stats.rows_moved == moved
    cache.truncate(long, 128)
    assert cache.stride == 128
    expect_contents(cache)


def test_the_stride_shrinks_where_a_further_sequence_fits_only_so(device: Device) -> None:
    cache = make_cache(device, 512)
    long, _ = run(cache, TEXTS[0][:200], TEXTS[1][:3])
    cache.truncate(long, 100)
    assert cache.stride == 256
    cache.fork(long, 99)
    assert cache.stride == 128 and cache.lengths == [100, 3, 99]
    expect_contents(cache)


def test_a_single_sequence_may_have_all_rows_and_be_continued_later(device: Device) -> None:
    """A conversation that fills the cache: its rows move into the slot, and are not run again."""
    cache = make_cache(device, 320)
    (first,) = run(cache, TEXTS[0][:300])
    assert cache.stride == 320
    cache.free(first, keep=True)
    second = cache.allocate([*TEXTS[0][:300], 7])
    assert cache.tokens(second) == TEXTS[0][:300] and inactive(cache) == []
    append(cache, 0, [7])
    expect_contents(cache)


def test_the_longest_prefix_is_reused_without_the_last_token(device: Device) -> None:
    cache = make_cache(device, 1024)
    first, second = run(cache, TEXTS[0][:60], TEXTS[1][:120])
    cache.free(second, keep=True)
    assert cache.length(cache.allocate(TEXTS[1][:120])) == 119  # inactive
    assert cache.length(cache.allocate(TEXTS[0][:50])) == 49  # active
    assert cache.length(cache.allocate([*TEXTS[0][:45], 9, 9])) == 45
    assert cache.length(cache.allocate([9, *TEXTS[0]])) == 0
    assert cache.length(cache.allocate([0])) == 0
    stats = cache.stats
    assert (stats.prefix_hits, stats.prefix_rows) == (3, 119 + 49 + 45)
    assert stats.tokens_committed == 180 and cache.length(first) == 60
    expect_contents(cache)


def test_no_more_is_reused_than_the_slots_can_hold(device: Device) -> None:
    cache = make_cache(device, 512)
    (long,) = run(cache, TEXTS[0][:300])
    cache.free(long, keep=True)
    run(cache, TEXTS[2][:10], TEXTS[1][:10])
    assert cache.length(cache.allocate(TEXTS[0][:300])) == 128  # three slots × 128, not × 512
    assert inactive(cache) == []
    expect_contents(cache)


def test_rows_that_are_reused_survive_the_slots_that_grow_over_them(device: Device) -> None:
    cache = make_cache(device, 1024)
    kept, *_ = run(cache, [5] * 800)
    cache.free(kept, keep=True)
    run(cache, TEXTS[0][:60], TEXTS[2][:60])
    handle = cache.allocate([5] * 201)
    assert cache.stride == 256 and cache.tokens(handle) == [5] * 200
    expect_contents(cache)


def test_inactive_rows_move_out_of_the_way_before_the_slots_grow(device: Device) -> None:
    cache = make_cache(device, 320)
    for handle in run(cache, *[text[40:100] for text in TEXTS[:3]]):
        cache.free(handle, keep=True)
    run(cache, [7] * 60, [8] * 60)
    assert cache.stats.rows_inactive == 180 and cache.slots.inactive.sequences[-1].start == 140
    append(cache, 0, [9] * 10)
    assert cache.stride == 128 and inactive(cache) == [TEXTS[2][40:100]]
    expect_contents(cache)  # slot 1 is at 128 to 188 now


def test_of_kept_sequences_that_begin_alike_the_longest_is_held(device: Device) -> None:
    cache = make_cache(device, 1024)
    short, long, other = run(cache, TEXTS[0][:50], TEXTS[0][:60], TEXTS[1][:50])
    cache.free(short, keep=True)
    cache.free(other, keep=True)
    cache.free(long, keep=True)
    assert inactive(cache) == [TEXTS[1][:50], TEXTS[0][:60]]
    (again,) = run(cache, TEXTS[1][:30])
    cache.free(again, keep=True)
    assert inactive(cache) == [TEXTS[0][:60], TEXTS[1][:50]]
    assert cache.stats.rows_inactive == 110
    expect_contents(cache)


def test_inactive_sequences_give_way_the_least_recently_used_first(device: Device) -> None:
    cache = make_cache(device, 256)
    for text in TEXTS[:3]:
        (handle,) = run(cache, text[40:100])  # 60 rows each
        cache.free(handle, keep=True)
    cache.free(cache.allocate(TEXTS[0][40:60]))  # the first is used once more
    handles = [cache.allocate()]
    assert inactive(cache) == [TEXTS[1][40:100], TEXTS[2][40:100], TEXTS[0][40:100]]
    handles.append(cache.allocate())
    assert inactive(cache) == [TEXTS[2][40:100], TEXTS[0][40:100]]
    append(cache, 0, [8] * 65)
    assert inactive(cache) == [] and cache.stats.evictions == 3
    expect_contents(cache)


def test_what_there_is_no_room_for_is_not_kept(device: Device) -> None:
    cache = make_cache(device, 128)
    first, second = run(cache, TEXTS[0][:60], TEXTS[2][:60])
    cache.free(first, keep=True)
    assert inactive(cache) == []
    cache.free(second, keep=True)
    assert inactive(cache) == [TEXTS[2][:60]]
    expect_contents(cache)


def test_bytes_per_token_of_k2(device: Device) -> None:
    cache = LatentCache(device, 61, 64, 576, BF16)
    cache.allocate()
    assert cache.stats.bytes_per_token == 70_272
    assert cache.stats.bytes_in_use == 64 * 70_272


def test_the_longest_prefix_is_found_in_no_time() -> None:
    """Of 100,000 tokens among 32 sequences; in plain Python it would take seconds."""
    slots, text = CacheSlots(64 * 2**17), array("q", range(100_000))
    for last in range(32):
        slots.allocate(array("q"))
        slots.active[-1].tokens.extend(text[: 60_000 + last])
    start = perf_counter()
    slots.allocate(text)
    assert perf_counter() - start < 0.5
    assert len(slots.active[-1].tokens) == 60_031


def _poison_a_free_row(cache: LatentCache) -> None:
    row = np.full((LAYERS, 1, WIDTH), np.nan, cache.dtype)
    cache.device.write(cache.rows[1:, 200:201], row[1:])


def _reach_into_the_inactive(cache: LatentCache) -> None:
    cache.slots.stride = 128


def _leave_a_gap(cache: LatentCache) -> None:
    cache.slots.inactive.sequences[0].start -= 1


def _hold_twice(cache: LatentCache) -> None:
    kept = cache.slots.inactive.sequences[0]
    cache.slots.inactive.sequences.append(type(kept)(kept.tokens[:5], kept.start - 5))


def _outgrow_the_stride(cache: LatentCache) -> None:
    cache.slots.active[0].tokens.extend([1] * 64)


def _give_a_handle_twice(cache: LatentCache) -> None:
    cache.slots.active[0].handle = cache.slots.active[1].handle


def _invent_a_handle(cache: LatentCache) -> None:
    cache.slots.active[0].handle = 99


def _break_the_stride(cache: LatentCache) -> None:
    cache.slots.stride = 65


def _forget_the_peak(cache: LatentCache) -> None:
    cache._peak = 64


def _misplace_the_rows(cache: LatentCache) -> None:
    shape = (LAYERS, cache.capacity + 1, WIDTH)
    cache.rows = cache.device.zeros(shape, cache.dtype)[:, 1:]


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (_poison_a_free_row, "layer 1, row 200: not finite"),
        (_reach_into_the_inactive, "active rows to 256, inactive from 196"),
        (_leave_a_gap, "not packed below 256"),
        (_hold_twice, "a prefix held twice"),
        (_outgrow_the_stride, "a sequence of 67 rows in a stride of 64"),
        (_give_a_handle_twice, "a handle twice"),
        (_invent_a_handle, "never issued"),
        (_break_the_stride, "stride 65 of 2 is no bucket"),
        (_forget_the_peak, "peak"),
        (_misplace_the_rows, "layer 0, slot 0: address"),
    ],
)
def test_check_finds(device: Device, fault: Callable[[LatentCache], None], message: str) -> None:
    cache = make_cache(device)
    _, _, third = run(cache, [1, 2, 3], [4, 5], TEXTS[2][:60])
    cache.free(third, keep=True)
    cache.check()
    fault(cache)
    with pytest.raises(AssertionError, match=message):
        cache.check()
