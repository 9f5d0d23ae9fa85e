"""How many rows a cache slot has, and whether so many slots fit."""

from runtime.cache.errors import CacheFullError

ROW_MULTIPLE = 64  # 64 rows of any width that is a multiple of 4 bytes are one of 256 bytes


def stride_for(length: int) -> int:
    """The smallest bucket, 64 · 2ⁿ rows, that holds a sequence of this length."""
    stride = ROW_MULTIPLE
    while stride < length:
        stride *= 2
    return stride


def largest_stride(capacity: int, count: int) -> int:
    """The most rows that each of `count` slots can have: a bucket, or all rows for one alone."""
    return capacity if count == 1 else stride_for(capacity // count + 1) // 2


def least_stride(count: int, longest: int) -> int:
    """The least that holds sequences of up to `longest` rows; one alone needs no bucket."""
    if count > 1:
        return stride_for(longest)
    return max(-(-longest // ROW_MULTIPLE), 1) * ROW_MULTIPLE


def require_rows(capacity: int, count: int, longest: int) -> int:
    """The stride for so many sequences: a bucket, or all rows for one alone.

    Raises CacheFullError where the least that they need is more than there is.
    """
    stride = least_stride(count, longest)
    if count * stride > capacity:
        raise CacheFullError(capacity, count, stride, longest)
    return min(stride_for(longest), capacity) if count == 1 else stride
