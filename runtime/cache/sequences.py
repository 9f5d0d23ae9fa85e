"""The sequences in the cache, active and inactive, and what they share with a prompt."""

from array import array
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class RowMove:
    """Copy `count` rows of every layer."""

    source: int
    target: int
    count: int


@dataclass(eq=False)
class ActiveSequence:
    """A sequence in a cache slot; it has one row per token."""

    handle: int
    tokens: "array[int]"


@dataclass(eq=False)
class InactiveSequence:
    """A finished sequence whose rows are still there, from row `start` on."""

    tokens: "array[int]"
    start: int


CachedSequence = ActiveSequence | InactiveSequence


def common_prefix(a: "array[int]", b: "array[int]") -> int:
    """How many tokens two sequences have in common from the start."""
    count = min(len(a), len(b))
    differ = np.asarray(a)[:count] != np.asarray(b)[:count]
    return int(differ.argmax()) if differ.any() else count


def longest_prefix(
    sequences: Iterable[CachedSequence], prompt: "array[int]"
) -> tuple[CachedSequence | None, int]:
    """The first sequence that shares the most tokens with the prompt, and how many."""
    best: tuple[CachedSequence | None, int] = None, 0
    for sequence in sequences:
        count = common_prefix(sequence.tokens, prompt)
        if count > best[1]:
            best = sequence, count
    return best
