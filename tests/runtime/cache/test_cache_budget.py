"""Memory for the cache: what a person may write, and the rows that it gives."""

import hypothesis.strategies as st
import pytest
from hypothesis import given

from runtime.cache.budget import BudgetError, CacheBudget, rows_within
from runtime.cache.errors import CacheError
from runtime.cache.strides import least_stride

FREE = 24_000_000_000


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("2GiB", 2 * 2**30),
        ("1500MB", 1_500_000_000),
        ("1.5 gib", 3 * 2**29),
        (" 10 kB ", 10_000),
        ("0.5TB", 500_000_000_000),
        ("1TiB", 2**40),
        ("123B", 123),
        ("75%", 18_000_000_000),
        ("12.5 %", 3_000_000_000),
        ("100%", FREE),
    ],
)
def test_bytes_and_shares(text: str, expected: int) -> None:
    assert CacheBudget.parse(text).bytes_of(FREE) == expected


def test_only_a_share_depends_on_what_is_free() -> None:
    assert CacheBudget.parse("2GiB").bytes_of(0) == 2 * 2**30
    assert CacheBudget.parse("50%").bytes_of(1001) == 500
    assert CacheBudget.parse("50%").bytes_of(-1) == 0


@pytest.mark.parametrize(
    "text",
    ["", "2", "GiB", "-1GiB", "0GiB", "0%", "101%", "1.GiB", "2 Gi", "2G", "2GBs", "2ib", "1e9B"],
)
def test_nonsense_is_refused(text: str) -> None:
    with pytest.raises(BudgetError, match="such as 2GiB or 1500MB") as caught:
        CacheBudget.parse(text)
    assert str(caught.value).endswith(f"got {text!r}") and isinstance(caught.value, CacheError)


def test_k2_in_8_gib() -> None:
    """70,272 bytes a row of all 61 layers."""
    rows = rows_within(8 * 2**30, 61, 576, 2, [4096] * 16)
    assert rows == 122_176 and rows % 64 == 0
    assert rows * 70_272 <= 8 * 2**30 < (rows + 64) * 70_272


@pytest.mark.parametrize(
    ("lengths", "needed"),
    [
        ([4097] * 8, r"8 × 8192 = 65536 rows, 4,605,345,792 bytes, .* 8 sequences of up to 4097"),
        ([10] * 15 + [4096], r"16 × 4096 = 65536 rows, 4,605,345,792 bytes, .* 16 sequences of"),
        ([30_001], r"1 × 30016 = 30016 rows, 2,109,284,352 bytes, .* 1 sequence of up to 30001"),
    ],
)
def test_too_little_is_refused_with_the_arithmetic(lengths: list[int], needed: str) -> None:
    row = r"61 layers × 576 × 2 bytes = 70,272 bytes"
    with pytest.raises(BudgetError, match=rf"{needed}.* 2,000,000,000 bytes, 28416 rows of {row}"):
        rows_within(2_000_000_000, 61, 576, 2, lengths)


def test_no_memory_at_all_is_refused() -> None:
    with pytest.raises(BudgetError, match=r"1 × 64 = 64 rows.* 0 bytes, 0 rows"):
        rows_within(0, 61, 576, 2, [1])


@given(
    st.integers(0, 10**7), st.integers(1, 8), st.lists(st.integers(0, 700), min_size=1, max_size=9)
)
def test_the_rows_are_all_that_fit(budget: int, layers: int, lengths: list[int]) -> None:
    count, row = len(lengths), layers * 36
    needed = count * least_stride(count, max(lengths))
    if budget // row < needed:
        with pytest.raises(BudgetError, match=f"= {needed} rows, {needed * row:,} bytes"):
            rows_within(budget, layers, 18, 2, lengths)
        return
    rows = rows_within(budget, layers, 18, 2, lengths)
    assert needed <= rows and rows % 64 == 0
    assert rows * row <= budget < (rows + 64) * row
