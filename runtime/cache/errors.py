"""The cache's errors. A refused operation has changed nothing."""

from collections.abc import Sequence

LISTED = 8  # handles in a message


class CacheError(RuntimeError):
    """A cache operation that was refused; the cache is as it was before the call."""


class CacheFullError(CacheError):
    """More rows are needed than there are, whatever gives way; the message has the arithmetic."""

    def __init__(self, capacity: int, count: int, stride: int, longest: int) -> None:
        super().__init__(
            f"the cache holds {capacity} rows a layer, inactive sequences not counted; slots × "
            f"stride, for a longest sequence of {longest} rows, is {count} × {stride} = "
            f"{count * stride}; wait until other sequences have ended, or make the cache larger"
        )


class StaleHandleError(CacheError):
    """A handle that belongs to no active sequence."""

    def __init__(self, handle: int, live: Sequence[int]) -> None:
        listed = ", ".join(map(str, live[:LISTED])) or "none"
        more = f" and {len(live) - LISTED} more" if len(live) > LISTED else ""
        super().__init__(
            f"sequence {handle}: expected an active one ({listed}{more}); this one was freed, or "
            "never allocated"
        )


class NonFiniteError(CacheError):
    """A new row that holds NaN or infinity, of sequence `handle` in `layer`."""

    def __init__(self, layer: int, handle: int) -> None:
        super().__init__(
            f"layer {layer}, sequence {handle}: a new cache row holds NaN or infinity; nothing was "
            "committed"
        )
        self.layer, self.handle = layer, handle
