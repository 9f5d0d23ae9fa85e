"""Which rows of the cache are whose: plain integers and token ids, no storage.

Active sequences are dense in slots 0, 1, …; slot s begins at row s × stride. The stride is a bucket
of 64 · 2ⁿ rows (for a single sequence at most all rows there are) that follows the longest of them:
it grows as soon as it must, and shrinks where a quarter of it would do, or where a further sequence
fits only so. Behind them, packed against the end of the buffer without gaps, lie the rows of
inactive sequences, kept for later prompts that begin alike. They give way, the least recently used
first, to anything that an active one needs.

Every operation first makes sure that it can be done, then changes the bookkeeping and returns the
moves that bring the rows where it says: to be done in order, each as memmove does it.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import permutations

import numpy as np

from runtime.cache.errors import CacheError, StaleHandleError
from runtime.cache.strides import ROW_MULTIPLE, largest_stride, require_rows, stride_for

SHRINK_FACTOR = 4  # hysteresis: a sequence that grows and shrinks by a little moves nothing


@dataclass(frozen=True)
class RowMove:
    """Copy `count` rows of every layer."""

    source: int
    target: int
    count: int


@dataclass(eq=False)
class ActiveSlot:
    """A sequence in a slot; it has one row per token."""

    handle: int
    tokens: "array[int]"


@dataclass(eq=False)
class InactiveSlot:
    """A finished sequence whose rows are still there, from row `start` on."""

    tokens: "array[int]"
    start: int


def common_prefix(a: "array[int]", b: "array[int]") -> int:
    """How many tokens two sequences have in common from the start."""
    count = min(len(a), len(b))
    differ = np.asarray(a)[:count] != np.asarray(b)[:count]
    return int(differ.argmax()) if differ.any() else count


class CacheSlots:
    """See the module's docstring. `inactive` has the least recently used first."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.stride = ROW_MULTIPLE
        self.active: list[ActiveSlot] = []  # by slot
        self.inactive: list[InactiveSlot] = []
        self.issued = self.evictions = self.prefix_hits = self.prefix_rows = 0

    @property
    def longest(self) -> int:
        return max((len(sequence.tokens) for sequence in self.active), default=0)

    @property
    def inactive_rows(self) -> int:
        return sum(len(sequence.tokens) for sequence in self.inactive)

    def slot(self, handle: int) -> int:
        """Raises StaleHandleError."""
        for slot, sequence in enumerate(self.active):
            if sequence.handle == handle:
                return slot
        raise StaleHandleError(handle, [sequence.handle for sequence in self.active])

    def require_slots(self, first: int, count: int) -> None:
        """Raises CacheError where the range is empty, or not all of it is in use."""
        if first < 0 or count < 1 or first + count > len(self.active):
            raise CacheError(f"{count} slots from {first} on asked for, {len(self.active)} in use")

    def allocate(self, prompt: "array[int]") -> list[RowMove]:
        """A new last slot, with what lies cached of the prompt, its last token excepted.

        Raises CacheFullError.
        """
        count = len(self.active) + 1
        require_rows(self.capacity, count, self.longest)
        source, reused = self._longest_prefix(prompt[:-1])
        reused = min(reused, largest_stride(self.capacity, count))
        if source is None:
            return self._append(prompt[:0], None)
        self.prefix_hits += 1
        self.prefix_rows += reused
        return self._append(prompt[:reused], source)

    def fork(self, handle: int, length: int | None) -> list[RowMove]:
        """A new last slot, with the first `length` tokens of an active sequence.

        Raises StaleHandleError, CacheFullError, and CacheError where it is not as long.
        """
        source = self.active[self.slot(handle)]
        tokens = source.tokens[: self._prefix(source, length)]
        return self._append(tokens, source)

    def truncate(self, handle: int, length: int) -> list[RowMove]:
        """Raises StaleHandleError, and CacheError where it is not as long."""
        sequence = self.active[self.slot(handle)]
        del sequence.tokens[self._prefix(sequence, length) :]
        return self._shrink()

    def free(self, handle: int, keep: bool) -> list[RowMove]:
        """The last slot moves into the hole. Raises StaleHandleError."""
        slot, last = self.slot(handle), len(self.active) - 1
        moves = self._keep(slot) if keep else []
        count = len(self.active[last].tokens)
        moves.append(RowMove(last * self.stride, slot * self.stride, count))
        self.active[slot] = self.active[last]
        self.active.pop()
        return moves + self._shrink()

    def reserve(self, first: int, counts: Sequence[int]) -> list[RowMove]:
        """Room for counts[b] more rows in slot first+b. Raises CacheError, CacheFullError."""
        self.require_slots(first, len(counts))
        taking = zip(self.active[first:], counts, strict=False)
        grown = [len(sequence.tokens) + count for sequence, count in taking]
        stride = self._stride(len(self.active), max(grown))  # others fit the present one
        return self._make_room(len(self.active) * stride) + self._lay_out(stride)

    def check(self) -> None:
        """Every invariant of the bookkeeping; raises AssertionError naming the one that broke."""
        handles, count, stride = [s.handle for s in self.active], len(self.active), self.stride
        assert len(set(handles)) == count, f"a handle twice: {handles}"
        assert all(0 < handle <= self.issued for handle in handles), f"never issued: {handles}"
        bucket = stride == stride_for(stride) or (count <= 1 and stride == self.capacity)
        assert bucket and stride <= self.capacity, f"stride {stride} of {count} is no bucket"
        assert self.longest <= stride, f"a sequence of {self.longest} rows in a stride of {stride}"
        end = self.capacity
        for kept in sorted(self.inactive, key=lambda kept: -kept.start):
            assert kept.tokens, "an inactive sequence of no rows"
            assert kept.start + len(kept.tokens) == end, f"inactive rows not packed below {end}"
            end = kept.start
        assert count * stride <= end, f"active rows to {count * stride}, inactive from {end}"
        for a, b in permutations(self.inactive, 2):
            assert common_prefix(a.tokens, b.tokens) < len(a.tokens), "a prefix held twice"

    def _stride(self, count: int, longest: int) -> int:
        """The present one where it will do, and fits, else what it takes. Raises CacheFullError."""
        needed = require_rows(self.capacity, count, longest)
        stride = max(needed, self.stride)
        return stride if count * stride <= self.capacity else needed

    def _prefix(self, sequence: ActiveSlot, length: int | None) -> int:
        found = len(sequence.tokens)
        length = found if length is None else length
        if not 0 <= length <= found:
            raise CacheError(f"sequence {sequence.handle}: {length} of its {found} rows asked for")
        return length

    def _longest_prefix(self, prompt: "array[int]") -> tuple[ActiveSlot | InactiveSlot | None, int]:
        """Who has most of it, and how much; of equals an active one, which gives way to nobody."""
        best: tuple[ActiveSlot | InactiveSlot | None, int] = None, 0
        sources: list[ActiveSlot | InactiveSlot] = [*self.active, *self.inactive]
        for sequence in sources:
            count = common_prefix(sequence.tokens, prompt)
            if count > best[1]:
                best = sequence, count
        return best

    def _append(
        self, tokens: "array[int]", source: ActiveSlot | InactiveSlot | None
    ) -> list[RowMove]:
        """A new last slot, with the rows of a prefix of another sequence. Raises CacheFullError.

        An inactive source becomes the most recently used, so it is the last to give way. Where
        even alone it would reach into the slots, it is cut to what is reused. That begins no lower
        than the new slot, so it can move there when all else has been laid out.
        """
        slot = len(self.active)
        stride = self._stride(slot + 1, max(self.longest, len(tokens)))
        end, cut = (slot + 1) * stride, None
        if isinstance(source, InactiveSlot):
            self._touch(source)
            if self.capacity - len(source.tokens) < end:
                cut = source
                del cut.tokens[len(tokens) :]
        moves = self._make_room(end, cut) + self._lay_out(stride)
        if source is not None:
            moves.append(RowMove(self._start(source), slot * stride, len(tokens)))
        if cut is not None:
            self.inactive.remove(cut)
        self.issued += 1
        self.active.append(ActiveSlot(self.issued, tokens))
        return moves

    def _start(self, source: ActiveSlot | InactiveSlot) -> int:
        if isinstance(source, InactiveSlot):
            return source.start
        return self.active.index(source) * self.stride

    def _keep(self, slot: int) -> list[RowMove]:
        """Copy a slot's rows behind the active ones, if there is room when all others give way.

        Of inactive sequences of which one begins with the other, only the longer is held.
        """
        tokens, last = self.active[slot].tokens, len(self.active) - 1
        for kept in self.inactive if tokens else []:
            if common_prefix(kept.tokens, tokens) == len(tokens):
                self._touch(kept)
                return []
        end = last * self.stride + (0 if slot == last else len(self.active[last].tokens))
        if not tokens or end + len(tokens) > self.capacity:
            return []
        self.inactive = [
            kept for kept in self.inactive if common_prefix(kept.tokens, tokens) < len(kept.tokens)
        ]
        moves = self._make_room(end + len(tokens))
        start = self.capacity - self.inactive_rows - len(tokens)
        self.inactive.append(InactiveSlot(tokens, start))
        return [*moves, RowMove(slot * self.stride, start, len(tokens))]

    def _touch(self, kept: InactiveSlot) -> None:
        self.inactive.remove(kept)
        self.inactive.append(kept)

    def _make_room(self, rows: int, spared: InactiveSlot | None = None) -> list[RowMove]:
        """Let inactive ones go until the first `rows` rows are free of them; pack the others."""
        while self.capacity - self.inactive_rows < rows and self.inactive[0] is not spared:
            del self.inactive[0]
            self.evictions += 1
        moves, end = [], self.capacity
        for kept in sorted(self.inactive, key=lambda kept: -kept.start):
            end -= len(kept.tokens)
            moves.append(RowMove(kept.start, end, len(kept.tokens)))
            kept.start = end
        return moves

    def _shrink(self) -> list[RowMove]:
        needed = stride_for(self.longest)
        return self._lay_out(needed) if needed * SHRINK_FACTOR <= self.stride else []

    def _lay_out(self, stride: int) -> list[RowMove]:
        """All slots at another stride: last first where they move up, else first first."""
        moves = [
            RowMove(slot * self.stride, slot * stride, len(sequence.tokens))
            for slot, sequence in enumerate(self.active)
        ]
        if stride > self.stride:
            moves.reverse()
        self.stride = stride
        return moves
