"""Choosing a request's next token from logits.

The order is that of transformers (`generation/logits_process.py`): repetition penalty, temperature,
top-k, top-p, min-p. vLLM differs in one point, its min-p stands before top-k and top-p. Where the
definitions come from: repetition penalty, Keskar et al. 2019 (CTRL), §4.1, negative logits
multiplied as both libraries do; top-k, Fan et al. 2018; top-p, Holtzman et al. 2020 (nucleus
sampling), §3.1; min-p, Nguyen et al. 2024.

Of equal candidates the one with the lower id goes first, everywhere; so top-k keeps exactly k,
where both libraries keep all that equal the k-th. A draw inverts the cumulative distribution over
ascending ids, with one uniform number a token whatever the filters. All in float64.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from graphs.contract.tensorfile import Array

SORTED_FIRST = 1024  # of the likeliest: mostly they reach top-p, and the rest need no sorting


class SamplingError(ValueError):
    """A setting out of range, or logits that nothing can be chosen from."""


_LIMITS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "temperature": ("a number from 0 (greedy) to 100", lambda v: 0 <= v <= 100),
    "top_k": ("a whole number, at least 0 (off)", lambda v: v >= 0),
    "top_p": ("a number above 0, at most 1 (off)", lambda v: 0 < v <= 1),
    "min_p": ("a number from 0 (off) to 1", lambda v: 0 <= v <= 1),
    "repetition_penalty": ("a number from 0.01 to 100 (1: off)", lambda v: 0.01 <= v <= 100),
    "seed": ("a whole number from 0 to 2^64 - 1", lambda v: 0 <= v < 2**64),
}
WHOLE = ("top_k", "seed")


@dataclass(frozen=True)
class SamplingParams:
    """Settings of a request's choice of tokens. Raises SamplingError where one is out of range.

    At temperature 0 the likeliest token is taken, after the repetition penalty; the filters would
    not change it.
    """

    temperature: float = 0.0
    top_k: int = 0  # keep the k likeliest
    top_p: float = 1.0  # keep the fewest, likeliest first, that have this probability together
    min_p: float = 0.0  # keep what is at least this share of the likeliest's probability
    repetition_penalty: float = 1.0  # divides positive logits of seen tokens, multiplies negative
    seed: int = 0

    def __post_init__(self) -> None:
        for name, (expected, holds) in _LIMITS.items():
            value, kind = getattr(self, name), int if name in WHOLE else (int, float)
            if isinstance(value, bool) or not isinstance(value, kind) or not holds(value):
                raise SamplingError(f"{name}: expected {expected}, got {value!r}")


class Sampler:
    """Chooses one request's tokens, and remembers them for the repetition penalty."""

    def __init__(self, params: SamplingParams, prompt_ids: Sequence[int] = ()) -> None:
        """`prompt_ids`, below the vocabulary's size, count as seen for the repetition penalty."""
        self.params = params
        self._seen = np.unique(np.asarray(prompt_ids, np.int64))
        self._generator = np.random.default_rng(params.seed)

    def __call__(self, logits: Array) -> int:
        """The next token's id from logits fp32 [vocab].

        Raises SamplingError, with nothing drawn, where one is not finite.
        """
        logits = logits.astype(np.float64)  # a copy
        _require_finite(logits)
        if self.params.repetition_penalty != 1:
            _penalise(logits, self._seen, self.params.repetition_penalty)
        token = self._draw(logits) if self.params.temperature else int(logits.argmax())
        self._seen = np.append(self._seen, token)
        return token

    def _draw(self, logits: Array) -> int:
        ids, weights = _candidates(self.params, logits)
        cumulative = weights.cumsum()
        threshold = self._generator.random() * cumulative[-1]
        return int(ids[np.searchsorted(cumulative, threshold, side="right")])


def _require_finite(logits: Array) -> None:
    finite = np.isfinite(logits)
    if not finite.all():
        first = int(finite.argmin())
        raise SamplingError(f"logits: expected finite values, got {logits[first]} for id {first}")


def _penalise(logits: Array, seen: Array, penalty: float) -> None:
    """Make seen ids less likely, in place; an id seen more than once is penalised once."""
    old = logits[seen]
    logits[seen] = np.where(old > 0, old / penalty, old * penalty)


def _candidates(params: SamplingParams, logits: Array) -> tuple[Array, Array]:
    """The ids that may be drawn, ascending, and their weights: probabilities up to a factor."""
    ids = _largest(logits, params.top_k or len(logits))
    weights = logits[ids]
    weights -= weights.max()  # in place, here and below: new pages cost more than the arithmetic
    with np.errstate(over="ignore"):  # at the tiniest temperatures to -inf, whose weight is 0
        weights /= params.temperature
    np.exp(weights, out=weights)
    if params.top_p < 1:
        kept = _largest(weights, _reaching(weights, params.top_p))
        ids, weights = ids[kept], weights[kept]
    if params.min_p > 0:
        kept = np.flatnonzero(weights >= params.min_p)  # the largest weight is 1
        ids, weights = ids[kept], weights[kept]
    return ids, weights


def _largest(values: Array, count: int) -> Array:
    """Where the largest values are, ascending; of equal values the first."""
    if count >= len(values):
        return np.arange(len(values))
    least = np.partition(values, -count)[-count]
    kept = values > least
    equal = np.flatnonzero(values == least)
    kept[equal[: count - np.count_nonzero(kept)]] = True
    return np.flatnonzero(kept)


def _reaching(weights: Array, share: float) -> int:
    """The number of largest weights that together reach that share of the sum."""
    target = share * weights.sum()
    first = min(SORTED_FIRST, len(weights))
    for largest in (np.partition(weights, -first)[-first:], weights):
        cumulative = np.sort(largest)[::-1].cumsum()
        if target <= cumulative[-1]:
            return int(np.searchsorted(cumulative, target)) + 1
    return len(weights)  # where rounding left the last sum below the target
