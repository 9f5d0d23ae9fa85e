"""Faults of masks and positions: the lengths and the order that made them.

A mask is [B, L+S, S], keys-major: L cached rows of which a sequence has the first `length`, then
the step's own S keys. It is read from what is visible alone, so masked scores serve.

1. the causal mask is off by one: query i sees own key i+1, or not its own key i;
2. the context length is off by one: a row too many, or one too few;
3. the valid length was taken before the step's rows were added: none of its own keys is seen;
4. the mask is aligned to the wrong corner: query i sees keys 0 … i in place of 0 … length+i;
5. positions are off by one, or those of one sequence are given to all.
"""

from collections.abc import Iterator

import numpy as np

from graphs.contract.tensorfile import Array
from graphs.ops import MASKED
from graphs.parity.compare import ReplayCase
from graphs.parity.findings import Hint
from graphs.parity.hints.evidence import make_hint


def mask_hint(
    case: ReplayCase, tap: str, actual: Array, expected: Array, cached: int
) -> list[Hint]:
    """A hint if exactly one fault explains every key. cached: the L of the masks."""
    visible, expected_visible = actual > MASKED / 2, expected > MASKED / 2
    if (visible == expected_visible).all():
        return []
    lengths = expected_visible[:, :cached].sum(axis=1)[:, :1]  # [B,1], the same for every query
    faults = _faulty_masks(lengths, cached, expected_visible.shape[2])
    fitting = [(cause, text) for cause, text, mask in faults if (mask == visible).all()]
    if len({cause for cause, _ in fitting}) != 1:  # with one token a step, faults look alike
        return []
    evidence = (
        f"this explains all {visible.size} keys, {int((visible != expected_visible).sum())} of "
        "which are not as expected"
    )
    return [make_hint(case, tap, *fitting[0], evidence)]


def _faulty_masks(lengths_B1: Array, L: int, S: int) -> Iterator[tuple[str, str, Array]]:
    """Cause, text and visible keys [B,L+S,S] of each fault."""
    key, query = np.arange(S)[:, None], np.arange(S)[None, :]
    lengths = lengths_B1[:, :, None]

    def mask(cached: Array, keys: Array) -> Array:
        B = len(lengths)
        parts = np.broadcast_to(cached, (B, L, S)), np.broadcast_to(keys, (B, S, S))
        return np.concatenate(parts, axis=1)

    index = np.arange(L)[None, :, None]
    cached, causal = index < lengths, key <= query
    for shift, text in (
        (1, "each token sees the one after it: the causal mask is off by one"),
        (-1, "no token sees itself: the causal mask is off by one"),
    ):
        yield "causal_mask_off_by_one", text, mask(cached, key <= query + shift)
    for shift, text in (
        (1, "one cached row too many is seen: the context length is off by one"),
        (-1, "the last cached row is not seen: the context length is off by one"),
    ):
        yield "context_length_off_by_one", text, mask(index < lengths + shift, causal)
    text = "no token of the step sees any of its step: the length was taken before they were added"
    yield "valid_length_before_write", text, mask(cached, np.zeros((S, S), bool))
    text = "query i sees keys 0 to i in place of 0 to length+i: aligned to the wrong corner"
    corner = mask(cached & (index <= query), key + lengths <= query)
    yield "mask_aligned_to_wrong_corner", text, corner


def position_hint(case: ReplayCase, actual: Array, expected: Array) -> list[Hint]:
    """A hint on positions, int [B, S]."""
    difference = np.unique(actual.astype(np.int64) - expected)
    evidence = f"positions differ by {difference.tolist()[:4]}"
    if difference.tolist() in ([1], [-1]):
        text = "every position is off by one: the context length is off by one"
        return [make_hint(case, "positions", "context_length_off_by_one", text, evidence)]
    if difference.any() and len(actual) > 1 and (actual == actual[:1]).all():
        text = "every sequence has the same positions, whatever its length"
        return [make_hint(case, "positions", "positions_shared", text, evidence)]
    return []
