"""The latent KV cache: one allocation for all layers, and the sequences in its rows.

`rows` is [layers, rows, W]. The first slots × stride rows of each layer are viewed as [slots,
stride, W], so that a range of slots is one contiguous batch, bound in place; behind them lie the
rows of finished sequences that a new prompt may begin with. runtime/cache/slots.py says what lies
where; this module moves, reads and writes the rows. What a batch costs is slots × stride rows: many
short sequences or few long ones fit the same memory.

Engines only read the cache. After the whole chain has succeeded, `commit` appends the step's rows
to all layers at once, so a step that fails anywhere has changed nothing. Every row is finite at all
times: a masked row still takes part as 0 × value, and 0 × NaN would reach a neighbour.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from graphs.contract.tensorfile import ALIGNMENT, Array
from runtime.cache.errors import CacheError, NonFiniteError
from runtime.cache.sequences import RowMove
from runtime.cache.slots import CacheSlots
from runtime.cache.strides import ROW_MULTIPLE, require_rows
from runtime.devices.base import Buffer, Device

CHECKED_AT_ONCE = 4096  # rows


@dataclass(frozen=True)
class CacheStatistics:
    """Rows are per layer, bytes for all layers; the lower half counts since the cache was made."""

    bytes_per_token: int
    stride: int
    rows_in_use: int  # slots × stride
    bytes_in_use: int
    rows_inactive: int
    rows_peak: int  # the most that were in use
    rows_moved: int  # copied from place to place, prefixes included
    evictions: int  # of inactive sequences
    prefix_hits: int
    prefix_rows: int  # reused by them
    tokens_committed: int


class LatentCache:
    """A sequence is known by the handle that `allocate` returned; see the module's docstring.

    An operation that raises has changed nothing. `handles` and `lengths` are by slot.
    """

    def __init__(
        self, device: Device, layers: int, rows: int, width: int, dtype: np.dtype[Any]
    ) -> None:
        """Raises DeviceError where there is no memory for it."""
        if rows < ROW_MULTIPLE or rows % ROW_MULTIPLE:
            raise ValueError(f"rows: expected a multiple of {ROW_MULTIPLE}, got {rows}")
        if ROW_MULTIPLE * width * dtype.itemsize % ALIGNMENT:
            raise ValueError(
                f"{ROW_MULTIPLE} rows: expected a multiple of {ALIGNMENT} bytes, got rows of "
                f"{width} × {dtype.itemsize} bytes"
            )
        self.device, self.dtype = device, dtype
        self.rows: Buffer = device.zeros((layers, rows, width), dtype)
        self.slots = CacheSlots(rows)
        self._peak = self._moved = self._committed = 0

    @property
    def capacity(self) -> int:
        """Rows per layer."""
        return self.slots.capacity

    @property
    def stride(self) -> int:
        return self.slots.stride

    @property
    def handles(self) -> list[int]:
        return [sequence.handle for sequence in self.slots.active]

    @property
    def lengths(self) -> list[int]:
        return [len(sequence.tokens) for sequence in self.slots.active]

    def slot(self, handle: int) -> int:
        """Raises StaleHandleError; changes when another sequence is freed."""
        return self.slots.slot(handle)

    def length(self, handle: int) -> int:
        """Raises StaleHandleError."""
        return len(self.slots.active[self.slots.slot(handle)].tokens)

    def tokens(self, handle: int) -> list[int]:
        """The token ids of its rows. Raises StaleHandleError."""
        return list(self.slots.active[self.slots.slot(handle)].tokens)

    def allocate(self, prompt: Sequence[int] = ()) -> int:
        """A handle for a new sequence, in the slot behind the last.

        It begins with the longest prefix of prompt[:-1] that any sequence has cached (the last
        token is to be run for its logits); `length` says how long that is. Raises CacheFullError.
        """
        self._move(self.slots.allocate(array("q", prompt)))
        return self.slots.issued

    def fork(self, handle: int, length: int | None = None) -> int:
        """A handle for a new sequence that begins with the first `length` rows of another's.

        Raises StaleHandleError, CacheFullError, and CacheError where it is not as long.
        """
        self._move(self.slots.fork(handle, length))
        return self.slots.issued

    def truncate(self, handle: int, length: int) -> None:
        """Drop rows from the end. Raises StaleHandleError; CacheError where it is not as long."""
        self._move(self.slots.truncate(handle, length))

    def free(self, handle: int, keep: bool = False) -> None:
        """Forget a sequence; with `keep`, its rows stay for reuse while there is room for them.

        Raises StaleHandleError.
        """
        self._move(self.slots.free(handle, keep))

    def require(self, lengths: Sequence[int]) -> None:
        """Raises CacheFullError where sequences of these lengths cannot be active together."""
        if lengths:
            require_rows(self.capacity, len(lengths), max(lengths))

    def reserve(self, first: int, counts: Sequence[int]) -> None:
        """Make room for counts[b] further rows in slot first+b; slots stay in their order.

        Raises CacheFullError, and CacheError where a slot is not in use.
        """
        self._move(self.slots.reserve(first, counts))

    def has_room_behind(self, slot: int) -> bool:
        """Whether the cache holds a further slot behind this one, in use or not."""
        return (slot + 2) * self.stride <= self.capacity

    def context(self, layer: int, first: int, count: int, padding: int = 0) -> Buffer:
        """The cached rows of `count` slots, [count, L, W], contiguous, in place; to be read only.

        L is the stride, or a lone slot's own length. `padding` further slots may be free: what
        lies there is finite. Raises CacheError where a slot is not in use.
        """
        self.slots.require_slots(first, count)
        count += padding
        start = first * self.stride
        if count == 1:
            return self.rows[layer, start : start + len(self.slots.active[first].tokens)][None]
        view = self.rows[layer, start : start + count * self.stride]
        return view.reshape(count, self.stride, -1)

    def commit(self, first: int, staged: Buffer, tokens: Sequence[Sequence[int]]) -> None:
        """Append staged[:, b, :len(tokens[b])] to slot first+b, for all layers or for none.

        staged: [layers, B, S, W], the rows of these tokens. Raises NonFiniteError, and CacheError
        where slots, shapes or types do not match or room was not reserved.
        """
        ids = [array("q", sequence) for sequence in tokens]
        self._check_step(first, staged, [len(sequence) for sequence in ids])
        layers, B, S, W = staged.shape
        lengths = self.lengths[first:]
        places = [(first + b) * self.stride + lengths[b] + np.arange(len(ids[b])) for b in range(B)]
        kept = np.concatenate([b * S + np.arange(len(ids[b])) for b in range(B)])
        rows = staged.reshape(layers, B * S, W)
        self._require_finite(first, self.device.finite_rows(rows, kept), kept // S)
        self.device.put_rows(self.rows, np.concatenate(places), rows, kept)
        for sequence, new in zip(self.slots.active[first:], ids, strict=False):
            sequence.tokens.extend(new)
        self._committed += len(kept)

    @property
    def stats(self) -> CacheStatistics:
        slots, bytes_per_token = self.slots, self._bytes_per_token
        rows = len(slots.active) * slots.stride
        return CacheStatistics(
            bytes_per_token=bytes_per_token,
            stride=slots.stride,
            rows_in_use=rows,
            bytes_in_use=rows * bytes_per_token,
            rows_inactive=slots.inactive.count,
            rows_peak=self._peak,
            rows_moved=self._moved,
            evictions=slots.inactive.evictions,
            prefix_hits=slots.prefix_hits,
            prefix_rows=slots.prefix_rows,
            tokens_committed=self._committed,
        )

    @property
    def _bytes_per_token(self) -> int:
        layers, _, width = self.rows.shape
        return int(layers * width * self.dtype.itemsize)

    def check(self) -> None:
        """Verify every invariant; raises AssertionError naming the one that broke."""
        self.slots.check()
        layers, stats = self.rows.shape[0], self.stats
        assert stats.rows_in_use <= stats.rows_peak <= self.capacity, f"peak: {stats}"
        assert stats.prefix_hits <= stats.prefix_rows, f"prefix hits: {stats}"
        for layer in range(layers):
            for slot in range(len(self.slots.active)):
                address = self.device.address(self.context(layer, slot, 1))
                assert address % ALIGNMENT == 0, f"layer {layer}, slot {slot}: address {address}"
        for start in range(0, self.capacity, CHECKED_AT_ONCE):
            rows = np.arange(start, min(start + CHECKED_AT_ONCE, self.capacity))
            bad = np.argwhere(~self.device.finite_rows(self.rows, rows))
            assert not len(bad), f"layer {bad[0, 0]}, row {start + bad[0, 1]}: not finite"

    def _move(self, moves: Sequence[RowMove]) -> None:
        for move in moves:
            if move.count and move.source != move.target:
                self.device.move_rows(self.rows, move.source, move.target, move.count)
                self._moved += move.count
        self._peak = max(self._peak, len(self.slots.active) * self.slots.stride)

    def _check_step(self, first: int, staged: Buffer, counts: list[int]) -> None:
        self.slots.require_slots(first, len(counts))
        layers, _, width = self.rows.shape
        expected, shape = (layers, len(counts), max(counts), width), tuple(staged.shape)
        same = (*expected[:2], width) == (*shape[:2], shape[-1]) and len(shape) == 4
        if not same or shape[2] < expected[2] or self.device.dtype(staged) != self.dtype:
            raise CacheError(
                f"commit: expected {self.dtype} {list(expected)}, the third size or more, got "
                f"{self.device.dtype(staged)} {list(shape)}"
            )
        for b, count in enumerate(counts):
            sequence = self.slots.active[first + b]
            if len(sequence.tokens) + count > self.stride:
                raise CacheError(
                    f"commit: sequence {sequence.handle} has {len(sequence.tokens)} rows; {count} "
                    f"more were not reserved before the step (stride {self.stride})"
                )

    def _require_finite(self, first: int, finite: Array, batch: Array) -> None:
        """finite: [layers, rows]; batch: each row's place in the batch."""
        if not finite.all():
            layer, row = np.argwhere(~finite)[0]
            raise NonFiniteError(int(layer), self.slots.active[first + int(batch[row])].handle)
