"""The latent KV cache: one allocation for all layers, and plain integers that say what lies where.

`rows` is [layers, rows, W]. The first slots × stride rows of each layer are viewed as [slots,
stride, W], so that a range of slots is one contiguous batch, bound in place. Active slots are kept
dense (the last moves into a hole), and the stride follows the longest sequence in doubling buckets
of 64 rows: many short sequences or few long ones fit the same memory. What a batch costs is slots ×
stride rows.

Engines only read the cache. After the whole chain has succeeded, `commit` appends the step's rows
to all layers at once, so a step that fails anywhere has changed nothing. Every row is finite at all
times: a masked row still takes part as 0 × value, and 0 × NaN would reach a neighbour.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from graphs.tensorfile import Array

ROW_MULTIPLE = 64  # 64 rows of any even width ≥ 2 bytes start on a 256-byte boundary
SHRINK_FACTOR = 4  # the stride shrinks only where a quarter of it would do: hysteresis


class CacheError(RuntimeError):
    """A cache operation that was refused; the cache is as it was before the call."""


def stride_for(length: int) -> int:
    """The smallest bucket, 64 · 2ⁿ rows, that holds a sequence of this length."""
    stride = ROW_MULTIPLE
    while stride < length:
        stride *= 2
    return stride


@dataclass
class Slots:
    """Which sequence lies in which slot, and how long it is; no storage."""

    handles: list[int] = field(default_factory=list)  # by slot
    lengths: list[int] = field(default_factory=list)  # by slot
    stride: int = ROW_MULTIPLE
    issued: int = 0

    def slot(self, handle: int) -> int:
        """Raises CacheError where the handle is not that of a live sequence."""
        if handle not in self.handles:
            raise CacheError(
                f"sequence {handle}: no such live sequence (live: {self.handles}); it was freed, "
                "or never allocated"
            )
        return self.handles.index(handle)


class LatentCache:
    """See the module's docstring. A sequence is known by the handle that `allocate` returned."""

    def __init__(self, layers: int, rows: int, width: int, dtype: np.dtype[Any]) -> None:
        if rows < ROW_MULTIPLE or rows % ROW_MULTIPLE:
            raise ValueError(f"rows: a multiple of {ROW_MULTIPLE} expected, found {rows}")
        self.rows: Array = np.zeros((layers, rows, width), dtype=dtype)
        self.slots = Slots()

    @property
    def capacity(self) -> int:
        """Rows per layer."""
        return int(self.rows.shape[1])

    def length(self, handle: int) -> int:
        return self.slots.lengths[self.slots.slot(handle)]

    def allocate(self) -> int:
        """A handle for a new, empty sequence, in the slot behind the last. Raises CacheError."""
        self._require(len(self.slots.handles) + 1, self.slots.stride)
        self.slots.issued += 1
        self.slots.handles.append(self.slots.issued)
        self.slots.lengths.append(0)
        return self.slots.issued

    def free(self, handle: int) -> None:
        """Forget a sequence; the last slot's rows move into its place. Raises CacheError."""
        slots, hole = self.slots, self.slots.slot(handle)
        last = len(slots.handles) - 1
        if hole != last:
            source, target, count = last * slots.stride, hole * slots.stride, slots.lengths[last]
            self.rows[:, target : target + count] = self.rows[:, source : source + count]
            slots.handles[hole], slots.lengths[hole] = slots.handles[last], slots.lengths[last]
        slots.handles.pop()
        slots.lengths.pop()
        needed = stride_for(max(slots.lengths, default=0))
        if needed * SHRINK_FACTOR <= slots.stride:
            self._set_stride(needed)

    def reserve(self, counts: Sequence[int]) -> None:
        """Make room for `counts` further rows in slots 0, 1, …; grows the stride where needed.

        Raises CacheError, before anything moved, where slots × stride would not fit.
        """
        lengths = list(self.slots.lengths)
        for slot, count in enumerate(counts):
            lengths[slot] += count
        longest = max(lengths, default=0)
        stride = stride_for(longest)
        if len(lengths) == 1:  # a single sequence may use every row
            stride = min(stride, self.capacity)
        self._require(len(lengths), max(stride, longest))
        if stride > self.slots.stride:
            self._set_stride(stride)

    def context(self, layer: int, first: int, count: int) -> Array:
        """The cached rows of `count` slots, [count, L, W], contiguous, in place; to be read only.

        L is the stride, and just the sequence's length where there is one slot.
        """
        slots = self.slots
        start, width = first * slots.stride, self.rows.shape[2]
        if count == 1:
            return self.rows[layer, start : start + slots.lengths[first]][None]
        view = self.rows[layer, start : start + count * slots.stride]
        return view.reshape(count, slots.stride, width)

    def commit(self, first: int, staged: Array, counts: Sequence[int]) -> None:
        """Append staged[:, b, :counts[b]] to slot first+b, for all layers or for none.

        staged: [layers, B, S, W]. Raises CacheError where a row to be kept is not finite (naming
        layer and sequence) or does not fit.
        """
        for b, count in enumerate(counts):
            self._require_finite(staged[:, b, :count], self.slots.handles[first + b])
            if self.slots.lengths[first + b] + count > self.slots.stride:
                raise CacheError("commit: rows were not reserved before the step")
        for b, count in enumerate(counts):
            slot = first + b
            start = slot * self.slots.stride + self.slots.lengths[slot]
            self.rows[:, start : start + count] = staged[:, b, :count]
            self.slots.lengths[slot] += count

    def check(self) -> None:
        """Verify every invariant; raises AssertionError naming the one that broke."""
        slots = self.slots
        used = len(slots.handles) * slots.stride
        assert len(slots.handles) == len(slots.lengths) == len(set(slots.handles)), "handles"
        assert used <= self.capacity, f"{used} rows in use of {self.capacity}"
        assert all(0 <= n <= slots.stride for n in slots.lengths), "a length beyond the stride"
        assert slots.stride % ROW_MULTIPLE == 0, f"stride {slots.stride}"
        assert np.isfinite(self.rows).all(), "a row that is not finite"

    def _require(self, count: int, stride: int) -> None:
        if count * stride > self.capacity:
            raise CacheError(
                f"the cache holds {self.capacity} rows a layer; {count} sequences of up to "
                f"{stride} rows need {count} × {stride} = {count * stride}"
            )

    def _require_finite(self, rows: Array, handle: int) -> None:
        finite = np.isfinite(rows).all(axis=(1, 2))
        if not finite.all():
            raise CacheError(
                f"layer {int(np.argmin(finite))}, sequence {handle}: a new cache row holds NaN or "
                "infinity; nothing was committed"
            )

    def _set_stride(self, stride: int) -> None:
        """Lay all slots out anew: last first where they move up, else first first."""
        old, lengths = self.slots.stride, self.slots.lengths
        order = range(len(lengths))
        for slot in reversed(order) if stride > old else order:
            source, target, count = slot * old, slot * stride, lengths[slot]
            self.rows[:, target : target + count] = self.rows[:, source : source + count]
        self.slots.stride = stride
