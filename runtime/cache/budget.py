"""Memory for the cache, as a person writes it, and the rows that it gives."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from runtime.cache.errors import CacheError
from runtime.cache.strides import ROW_MULTIPLE, least_stride

_AMOUNT = re.compile(r"\s*(\d+(?:\.\d+)?)\s*(%|[a-z]+)\s*", re.IGNORECASE)
_UNITS = {"b": 1} | {
    f"{letter}{infix}b": base**power
    for power, letter in enumerate("kmgt", start=1)
    for infix, base in (("", 1000), ("i", 1024))
}


class BudgetError(CacheError):
    """A text that is no amount of memory, or an amount that holds too little."""


@dataclass(frozen=True)
class CacheBudget:
    """A number of bytes, or a share of the bytes that are free."""

    amount: Fraction
    is_share: bool

    @classmethod
    def parse(cls, text: str) -> "CacheBudget":
        """ "2GiB" and "1500MB" are bytes, "75%" is a share. Raises BudgetError."""
        match = _AMOUNT.fullmatch(text)
        number, unit = match.groups() if match else ("0", "")
        share = unit == "%"
        amount = Fraction(number) * (Fraction(1, 100) if share else _UNITS.get(unit.lower(), 0))
        if amount <= 0 or (share and amount > 1):
            raise BudgetError(
                "memory for the cache: expected bytes such as 2GiB or 1500MB (a unit of B, kB, MB, "
                "GB, TB, KiB, MiB, GiB or TiB), or a share of what is free, up to 100%, got "
                f"{text!r}"
            )
        return cls(amount, share)

    def bytes_of(self, free: int) -> int:
        """Bytes, where so many are free."""
        return int(self.amount * max(free, 0) if self.is_share else self.amount)


def rows_within(budget: int, layers: int, width: int, itemsize: int, lengths: Sequence[int]) -> int:
    """The rows a layer, a multiple of 64, that a cache of `budget` bytes has.

    Raises BudgetError, with the arithmetic, where sequences of these lengths would not fit.
    """
    row = layers * width * itemsize
    rows = budget // row // ROW_MULTIPLE * ROW_MULTIPLE
    count, longest = len(lengths), max(lengths)
    stride = least_stride(count, longest)
    needed = count * stride
    if needed > rows:
        sequences = "1 sequence" if count == 1 else f"{count} sequences"
        raise BudgetError(
            f"memory for the cache: expected {count} × {stride} = {needed} rows, "
            f"{needed * row:,} bytes, for {sequences} of up to {longest} rows, got {budget:,} "
            f"bytes, {rows} rows of {layers} layers × {width} × {itemsize} bytes = {row:,} bytes"
        )
    return rows
