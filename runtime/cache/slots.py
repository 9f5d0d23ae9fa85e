"""Which rows of the cache belong to which sequence: plain integers and token ids, no storage.

Active sequences are dense in cache slots 0, 1, …; slot s begins at row s × stride. The stride is a
bucket of 64 · 2ⁿ rows (for a single sequence at most all rows there are) that follows the longest
of them: it grows as soon as it must, and shrinks where a quarter of it would do, or where a further
sequence fits only so. Behind them lie the rows of inactive sequences (see inactive.py).

Every operation first makes sure that it can be done, then changes the bookkeeping and returns the
moves that bring the rows where it says: to be done in order, each as memmove does it.
"""

from array import array
from collections.abc import Sequence

from runtime.cache.errors import CacheError, StaleHandleError
from runtime.cache.inactive import InactiveRows
from runtime.cache.sequences import (
    ActiveSequence,
    CachedSequence,
    InactiveSequence,
    RowMove,
    longest_prefix,
)
from runtime.cache.strides import ROW_MULTIPLE, largest_stride, require_rows, stride_for

SHRINK_FACTOR = 4  # hysteresis: a sequence that grows and shrinks by a little moves nothing


class CacheSlots:
    """See the module's docstring."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.stride = ROW_MULTIPLE
        self.active: list[ActiveSequence] = []  # by slot
        self.inactive = InactiveRows(capacity)
        self.issued = self.prefix_hits = self.prefix_rows = 0

    @property
    def longest(self) -> int:
        return max((len(sequence.tokens) for sequence in self.active), default=0)

    def slot(self, handle: int) -> int:
        """Raises StaleHandleError."""
        for slot, sequence in enumerate(self.active):
            if sequence.handle == handle:
                return slot
        raise StaleHandleError(handle, [sequence.handle for sequence in self.active])

    def require_slots(self, first: int, count: int) -> None:
        """Raises CacheError where the range is empty, or not all of it is in use."""
        if first < 0 or count < 1 or first + count > len(self.active):
            raise CacheError(
                f"cache slots: expected a range within the {len(self.active)} in use, got {count} "
                f"from {first} on"
            )

    def allocate(self, prompt: "array[int]") -> list[RowMove]:
        """A new last slot that begins with the cached prefix of prompt[:-1].

        Raises CacheFullError.
        """
        count = len(self.active) + 1
        require_rows(self.capacity, count, self.longest)
        # Of equals an active one, which gives way to nobody.
        source, reused = longest_prefix([*self.active, *self.inactive.sequences], prompt[:-1])
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
        pairs = zip(self.active[first:], counts, strict=False)
        grown = [len(sequence.tokens) + count for sequence, count in pairs]
        stride = self._stride(len(self.active), max(grown))  # others fit the present one
        return self.inactive.make_room(len(self.active) * stride) + self._lay_out(stride)

    def check(self) -> None:
        """Every invariant of the bookkeeping; raises AssertionError naming the one that broke."""
        handles, count, stride = [s.handle for s in self.active], len(self.active), self.stride
        assert len(set(handles)) == count, f"a handle twice: {handles}"
        assert all(0 < handle <= self.issued for handle in handles), f"never issued: {handles}"
        bucket = stride == stride_for(stride) or (count <= 1 and stride == self.capacity)
        assert bucket and stride <= self.capacity, f"stride {stride} of {count} is no bucket"
        assert self.longest <= stride, f"a sequence of {self.longest} rows in a stride of {stride}"
        self.inactive.check()
        end = self.capacity - self.inactive.count
        assert count * stride <= end, f"active rows to {count * stride}, inactive from {end}"

    def _stride(self, count: int, longest: int) -> int:
        """The present stride where it suffices and fits, else the least. Raises CacheFullError."""
        needed = require_rows(self.capacity, count, longest)
        stride = max(needed, self.stride)
        return stride if count * stride <= self.capacity else needed

    def _prefix(self, sequence: ActiveSequence, length: int | None) -> int:
        rows = len(sequence.tokens)
        length = rows if length is None else length
        if not 0 <= length <= rows:
            raise CacheError(
                f"sequence {sequence.handle}: expected a length of 0 to {rows}, got {length}"
            )
        return length

    def _append(self, tokens: "array[int]", source: CachedSequence | None) -> list[RowMove]:
        """A new last slot, with the rows of a prefix of another sequence. Raises CacheFullError.

        An inactive source becomes the most recently used, so it is the last to give way. Where
        even alone it would reach into the slots, it is cut to what is reused. That begins no lower
        than the new slot, so it can move there when all else has been laid out.
        """
        slot = len(self.active)
        stride = self._stride(slot + 1, max(self.longest, len(tokens)))
        end, cut = (slot + 1) * stride, None
        if isinstance(source, InactiveSequence):
            self.inactive.touch(source)
            if self.capacity - len(source.tokens) < end:
                cut = source
                del cut.tokens[len(tokens) :]
        moves = self.inactive.make_room(end, cut) + self._lay_out(stride)
        if source is not None:
            moves.append(RowMove(self._start(source), slot * stride, len(tokens)))
        if cut is not None:
            self.inactive.sequences.remove(cut)
        self.issued += 1
        self.active.append(ActiveSequence(self.issued, tokens))
        return moves

    def _start(self, source: CachedSequence) -> int:
        if isinstance(source, InactiveSequence):
            return source.start
        return self.active.index(source) * self.stride

    def _keep(self, slot: int) -> list[RowMove]:
        """Copy a slot's rows behind the active ones, if there is room when all others give way.

        Of inactive sequences of which one begins with the other, only the longer is held.
        """
        tokens, last = self.active[slot].tokens, len(self.active) - 1
        if not tokens or self.inactive.touch_holder(tokens):
            return []
        end = last * self.stride + (0 if slot == last else len(self.active[last].tokens))
        if end + len(tokens) > self.capacity:
            return []
        moves, start = self.inactive.add(tokens, end)
        return [*moves, RowMove(slot * self.stride, start, len(tokens))]

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
