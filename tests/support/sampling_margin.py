"""The sampler as its definitions read, one list and one sort at a time; and how near a choice was.

Two runs of a request differ in their logits' last bits. What may follow from it is another token,
but only where something was decided by a hair: which of two logits is the larger, whether the
likeliest tokens reach top-p without one more, whether a token has its share of the likeliest, or on
which side of the drawn number a cumulative probability lies.
"""

import math
from collections.abc import Sequence
from itertools import accumulate

from graphs.contract.tensorfile import Array
from runtime.serving.sampling import SamplingParams


def margin(params: SamplingParams, seen_ids: Sequence[int], logits_V: Array, u: float) -> float:
    """The least distance from a choice to being another one; infinite where there is no other.

    In logits, penalty applied, where an order decides: greedy, top-k, and who is the last within
    top-p. In probability where a sum or share does: top-p, min-p, and `u`, the number drawn from
    [0, 1). Boundaries count also where crossing them alone would not have changed the token.
    """
    return decide(params, seen_ids, logits_V, u)[1]


def decide(
    params: SamplingParams, seen_ids: Sequence[int], logits_V: Array, u: float
) -> tuple[int, float]:
    """The token that is chosen, and its margin."""
    logits = _penalised(logits_V.tolist(), set(seen_ids), params.repetition_penalty)
    order = sorted(range(len(logits)), key=lambda i: -logits[i])  # of equals the lower id first
    if params.temperature == 0:
        return order[0], _gap(logits, order, 1)
    kept = order[: params.top_k or None]
    distances = [_gap(logits, order, len(kept))]
    if params.top_p < 1:
        sums = list(accumulate(_softmax(logits, kept, params.temperature)))
        count = next((n for n, s in enumerate(sums, 1) if s >= params.top_p), len(sums))
        distances += [abs(s - params.top_p) for s in sums[:-1]]
        distances.append(_gap(logits, kept, count))
        kept = kept[:count]
    if params.min_p > 0:
        shares = _softmax(logits, kept, params.temperature)
        least = params.min_p * shares[0]
        distances += [abs(share - least) for share in shares[1:]]
        kept = [i for i, share in zip(kept, shares, strict=True) if share >= least]
    ids = sorted(kept)
    bounds = list(accumulate(_softmax(logits, ids, params.temperature)))[:-1]
    distances += [abs(u - bound) for bound in bounds]
    return ids[sum(bound <= u for bound in bounds)], min(distances)


def _penalised(logits: list[float], seen: set[int], penalty: float) -> list[float]:
    def penalised(logit: float) -> float:
        return logit / penalty if logit > 0 else logit * penalty

    return [penalised(logit) if i in seen else logit for i, logit in enumerate(logits)]


def _softmax(logits: list[float], ids: list[int], temperature: float) -> list[float]:
    """The probabilities of `ids` among themselves."""
    top = max(logits[i] for i in ids)
    weights = [math.exp((logits[i] - top) / temperature) for i in ids]
    total = math.fsum(weights)
    return [weight / total for weight in weights]


def _gap(logits: list[float], order: list[int], count: int) -> float:
    """By how much the last of the first `count` leads the next."""
    if count >= len(order):
        return math.inf
    return logits[order[count - 1]] - logits[order[count]]
