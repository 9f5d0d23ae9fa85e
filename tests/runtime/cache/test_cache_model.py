"""The latent cache against a plain dictionary of sequences, over random operations."""

from collections.abc import Callable
from random import Random
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from graphs.contract.tensorfile import Array
from runtime.cache.errors import CacheError, CacheFullError, NonFiniteError, StaleHandleError
from runtime.cache.strides import largest_stride, least_stride, stride_for
from runtime.devices.base import Device
from tests.support.cache_rows import (
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
    staged,
    unchanged,
)
from tests.support.doubles.devices import DEVICES

Tokens = list[int]
RANDOMS = st.randoms(use_true_random=True)  # inside a rule hypothesis would favour small cases


def in_common(a: Tokens, b: Tokens) -> int:
    return next(
        (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b))
    )


class CacheMachine(RuleBasedStateMachine):
    """Random operations on the cache, and on a dictionary {handle: tokens} of who is active.

    `kept`, least recently used first, is who should still be there of those who are not.
    """

    make_device: Any = staticmethod(DEVICES[0])
    dtype = FP32

    @initialize(capacity=st.sampled_from([192, 320, 512, 1024]))
    def start(self, capacity: int) -> None:
        self.capacity = capacity
        self.cache = make_cache(self.make_device(), capacity, self.dtype)
        self.model: dict[int, Tokens] = {}
        self.kept: list[Tokens] = []
        self.freed: list[int] = []
        self.stride = 64
        self.committed = self.hits = self.reused = self.evicted = self.peak = 0

    def fits(self, count: int, longest: int) -> bool:
        return count * least_stride(count, longest) <= self.capacity

    @property
    def longest(self) -> int:
        return max(map(len, self.model.values()), default=0)

    @property
    def end(self) -> int:
        """Of what the slots take."""
        return len(self.model) * self.stride

    def grow(self, longest: int) -> None:
        count, bucket = len(self.model), stride_for(longest)
        needed = min(bucket, self.capacity) if count == 1 else bucket
        fitting = count * self.stride <= self.capacity
        self.stride = max(needed, self.stride) if fitting else needed
        self.peak = max(self.peak, self.end)

    def shrink(self) -> None:
        if 4 * stride_for(self.longest) <= self.stride:
            self.stride = stride_for(self.longest)

    def evict(self, end: int, spared: int = 0) -> None:
        """The oldest give way until none reaches below row `end`, but not the last `spared`."""
        while len(self.kept) > spared and sum(map(len, self.kept)) > self.capacity - end:
            del self.kept[0]
            self.evicted += 1

    def a_handle(self, random: Random) -> int:
        return random.choice(sorted(self.model))

    def a_prompt(self, random: Random) -> Tokens:
        begin = random.choice([*TEXTS, *self.model.values(), *self.kept])
        length = random.randint(0, random.choice([60, 130, 500]))
        return begin[:length] + random.choices(range(10), k=random.randint(0, 2))

    @rule(random=RANDOMS, times=st.integers(1, 4))
    def allocate(self, random: Random, times: int) -> None:
        """New sequences; the rest of the prompt is run at once where it fits, but for some."""
        for _ in range(times):
            self.allocate_one(self.a_prompt(random), fill=random.random() < 0.8)

    def allocate_one(self, prompt: Tokens, fill: bool) -> None:
        count = len(self.model) + 1
        if not self.fits(count, self.longest):
            with unchanged(self.cache, CacheFullError, rf"is {count} × "):
                self.cache.allocate(prompt)
            return
        active = [in_common(tokens, prompt[:-1]) for tokens in self.model.values()]
        kept = [in_common(tokens, prompt[:-1]) for tokens in self.kept]
        found = max([0, *active, *kept])
        length = min(found, largest_stride(self.capacity, count))
        handle = self.cache.allocate(prompt)
        assert self.cache.slot(handle) == count - 1
        self.model[handle] = prompt[:length]
        self.grow(self.longest)
        self.hits += length > 0
        self.reused += length
        if found > max([0, *active]):
            self.use(self.kept[kept.index(found)], length)
        self.evict(self.end)
        if fill and self.fits(count, max(self.longest, len(prompt))):
            self.commit(count - 1, [prompt[length:]])

    def use(self, source: Tokens, length: int) -> None:
        """The source is now the last to give way, and becomes the new sequence where it must."""
        self.kept.remove(source)
        if len(source) + self.end <= self.capacity:
            self.kept.append(source)
            return
        self.kept.append(source[:length])
        self.evict(self.end, spared=1)
        del self.kept[-1]

    @precondition(lambda self: self.model)
    @rule(random=RANDOMS, times=st.integers(1, 4))
    def free(self, random: Random, times: int) -> None:
        for _ in range(min(times, len(self.model))):
            handle, keep = self.a_handle(random), random.random() < 0.8
            last, tokens = self.cache.handles[-1], self.model.pop(handle)
            end = self.end + (len(self.model[last]) if last != handle else 0)
            self.cache.free(handle, keep)
            self.freed.append(handle)
            if keep and tokens:
                self.keep(tokens, end)
            self.shrink()

    def keep(self, tokens: Tokens, end: int) -> None:
        """Behind the last row in use, if it is not held yet and there is room."""
        holder = next((kept for kept in self.kept if kept[: len(tokens)] == tokens), None)
        if holder is not None:
            self.kept.remove(holder)
            self.kept.append(holder)
        elif len(tokens) <= self.capacity - end:
            self.kept = [kept for kept in self.kept if tokens[: len(kept)] != kept]
            self.kept.append(tokens)
            self.evict(end, spared=1)

    @precondition(lambda self: self.model)
    @rule(random=RANDOMS)
    def fork(self, random: Random) -> None:
        handle, count = self.a_handle(random), len(self.model) + 1
        tokens = self.model[handle]
        length = random.choice([None, random.randint(0, len(tokens))])
        if not self.fits(count, self.longest):
            with unchanged(self.cache, CacheFullError, rf"is {count} × "):
                self.cache.fork(handle, length)
            return
        self.model[self.cache.fork(handle, length)] = tokens[:length]
        self.grow(self.longest)
        self.evict(self.end)

    @precondition(lambda self: self.model)
    @rule(random=RANDOMS)
    def truncate(self, random: Random) -> None:
        handle = self.a_handle(random)
        length = random.randint(0, len(self.model[handle]))
        self.cache.truncate(handle, length)
        del self.model[handle][length:]
        self.shrink()

    @precondition(lambda self: self.model)
    @rule(random=RANDOMS, poison=st.sampled_from([None, None, np.nan, np.inf, -np.inf]))
    def step(self, random: Random, poison: float | None) -> None:
        """Of a range of slots: several tokens of one, or a few of several."""
        first = random.randrange(len(self.model))
        slots = random.choice([1, random.randint(1, len(self.model) - first)])
        handles = self.cache.handles[first : first + slots]
        tokens = []
        for handle in handles:
            length = len(self.model[handle])
            count = random.choice([0, 1, 30] if slots > 1 else [1, 7, 60, 130, 300])
            tokens.append(random.choice(TEXTS)[length : length + count])
        longest = max(len(self.model[h]) + len(new) for h, new in zip(handles, tokens, strict=True))
        if not self.fits(len(self.model), longest):
            with unchanged(self.cache, CacheFullError, f"of {longest} rows"):
                self.cache.reserve(first, [len(new) for new in tokens])
        elif poison is None:
            self.commit(first, tokens)
        elif any(tokens):
            rows = self.reserve(first, tokens)
            b = random.choice([b for b, new in enumerate(tokens) if new])
            layer, row = random.randrange(LAYERS), random.randrange(len(tokens[b]))
            rows[layer, b, row, random.randrange(WIDTH)] = poison
            with unchanged(self.cache, NonFiniteError, rf"layer {layer}, sequence {handles[b]}: "):
                self.cache.commit(first, put(self.cache, rows), tokens)

    def reserve(self, first: int, tokens: list[Tokens]) -> Array:
        """Room for a step that fits; returns its rows. A step may always fail from here on."""
        counts = [len(new) for new in tokens]
        self.cache.reserve(first, counts)
        lengths = self.cache.lengths[first:]
        self.grow(max(length + n for length, n in zip(lengths, counts, strict=False)))
        self.evict(self.end)
        return staged(self.cache, first, tokens)

    def commit(self, first: int, tokens: list[Tokens]) -> None:
        rows = self.reserve(first, tokens)
        self.cache.commit(first, put(self.cache, rows), tokens)
        for handle, new in zip(self.cache.handles[first:], tokens, strict=False):
            self.model[handle] += new
            self.committed += len(new)

    @precondition(lambda self: self.freed)
    @rule(random=RANDOMS)
    def use_a_stale_handle(self, random: Random) -> None:
        cache, handle = self.cache, random.choice([*self.freed, 0, -1, 10**6])
        for use in (
            cache.free,
            cache.fork,
            cache.slot,
            cache.length,
            cache.tokens,
            lambda handle: cache.truncate(handle, 0),
            lambda handle: cache.free(handle, keep=True),
        ):
            with unchanged(cache, StaleHandleError, f"sequence {handle}: expected an active one"):
                use(handle)

    @precondition(lambda self: self.model)
    @rule(random=RANDOMS)
    def ask_for_more_than_there_is(self, random: Random) -> None:
        cache, handle, count = self.cache, self.a_handle(random), len(self.model)
        length = len(self.model[handle]) + random.randint(1, 9)
        with unchanged(cache, CacheError, rf"0 to {len(self.model[handle])}, got {length}"):
            cache.truncate(handle, length)
        with unchanged(cache, CacheError, rf"0 to {len(self.model[handle])}, got {length}"):
            cache.fork(handle, length)
        with unchanged(cache, CacheError, rf"the {count} in use, got 2 from {count - 1} on"):
            cache.reserve(count - 1, [1, 1])
        slot = cache.slot(handle)
        tokens = [[1] * (cache.stride - len(self.model[handle]) + 1)]
        rows = put(cache, staged(cache, slot, tokens))
        with unchanged(cache, CacheError, "were not reserved before the step"):
            cache.commit(slot, rows, tokens)

    @invariant()
    def as_the_model_says(self) -> None:
        expect_contents(self.cache)
        cache, stats = self.cache, self.cache.stats
        assert {handle: cache.tokens(handle) for handle in cache.handles} == self.model
        assert inactive(cache) == self.kept
        assert (stats.stride, stats.rows_in_use) == (self.stride, self.end)
        assert stats.rows_peak == self.peak
        assert stats.bytes_per_token == LAYERS * WIDTH * self.dtype.itemsize
        assert stats.bytes_in_use == self.end * stats.bytes_per_token
        assert stats.rows_inactive == sum(map(len, self.kept))
        assert (stats.prefix_hits, stats.prefix_rows) == (self.hits, self.reused)
        assert (stats.evictions, stats.tokens_committed) == (self.evicted, self.committed)


for make in DEVICES:
    for type_name, dtype in TYPES.items():
        name = f"CacheMachine_{make.__name__}_{type_name}"
        fields = {"make_device": staticmethod(make), "dtype": dtype}
        machine: Any = type(name, (CacheMachine,), fields)
        case = machine.TestCase
        examples = 40 if make is DEVICES[0] and dtype is FP32 else 10  # one bookkeeping serves all
        case.settings = settings(max_examples=examples, stateful_step_count=50, deadline=None)
        globals()[f"Test{name}"] = case
del case


LENGTHS = st.integers(1, 30) | st.integers(1, 700)


@pytest.mark.parametrize("make", DEVICES)
@given(data=st.data())
@settings(max_examples=10, deadline=None)
def test_what_was_admitted_is_never_refused(
    make: Callable[[], Device], data: st.DataObject
) -> None:
    """Case 19: a sequence that does not fit beside the others, all at full length, is refused with
    the arithmetic; those that do fit can grow in any order, and take slots × stride rows.
    """
    cache = make_cache(make(), 1024)
    finals: dict[int, int] = {}
    for _ in range(40):
        length, text = data.draw(LENGTHS), data.draw(st.sampled_from(TEXTS)) * 2
        asked = [*finals.values(), length]
        needed = len(asked) * least_stride(len(asked), max(asked))
        if data.draw(st.booleans()):
            if needed > 1024:
                with unchanged(cache, CacheFullError, rf"is {len(asked)} × .* = {needed};"):
                    cache.require(asked)
            else:
                cache.require(asked)
                finals[cache.allocate(text[:length])] = length
        elif finals:
            handle = data.draw(st.sampled_from(sorted(finals)))
            done, count = cache.length(handle), data.draw(st.sampled_from([1, 20, 700]))
            append(cache, cache.slot(handle), text[done : finals[handle]][:count])
            if cache.length(handle) == finals[handle]:
                cache.free(handle, keep=True)
                del finals[handle]
        assert cache.stats.rows_in_use == len(finals) * cache.stride <= 1024
    expect_contents(cache)
