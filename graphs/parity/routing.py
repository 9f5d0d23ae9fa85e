"""Two routings compared: experts as sets, with the margin of every token's choice.

A difference between experts whose scores for choosing (bias included), or between groups whose
scores, lie within the precision's noise is a tie, not an error: rounding decides. What it does to
the token's output is bounded all the same: y differs by Σ_e (w'_e − w_e)·E_e(h), so by at most
Σ_e |w'_e − w_e|·‖E_e(h)‖ over the experts of both choices.
"""

import math
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from graphs.contract.config import ModelConfig
from graphs.contract.gates import BEST_OF_GROUP, GroupScore
from graphs.contract.spec import Precision
from graphs.contract.tensorfile import Array, TensorFile
from graphs.parity.compare import TIE_MARGIN, ReplayCase
from graphs.parity.findings import RoutingRecord, Tie
from graphs.parity.replay import ExpertOutput


@dataclass(frozen=True)
class ExpertGroups:
    """The number of expert groups, and of those that may serve a token."""

    count: int
    kept: int
    score: GroupScore

    @classmethod
    def from_config(cls, config: ModelConfig) -> "ExpertGroups":
        return cls(config.n_group, config.topk_group, config.group_score or "max")


def choice_scores(golden: TensorFile, config: ModelConfig) -> Array:
    """The scores by which the reference chose experts, [M,E]."""
    scores: Array = golden["tap.gate_scores"] + (golden["bias"] if config.has_gate_bias else 0)
    return scores


def tie_limits(golden: TensorFile, config: ModelConfig, precision: Precision) -> Array:
    """Per token the largest difference of two scores that rounding can reverse, [M].

    A softmax's scores shrink with the number of experts, and so does their noise.
    """
    scores = golden["tap.gate_scores"]
    scale = scores.max(axis=1) if config.scoring_func == "softmax" else np.ones(len(scores))
    limits: Array = TIE_MARGIN[precision] * scale
    return limits


def compare_routing(
    case: ReplayCase,
    actual: tuple[Array, Array],
    expected: tuple[Array, Array],
    choice_ME: Array,
    groups: ExpertGroups,
    limits_M: Array,
) -> RoutingRecord:
    """Compare (experts [M,K], weights [M,K]) of both sides.

    choice_ME: the scores by which the reference chose.
    """
    agree = [set(a) == set(b) for a, b in zip(actual[0], expected[0], strict=True)]
    ties = []
    for token in np.flatnonzero(np.logical_not(agree)).tolist():
        right, chosen = (sorted(side[0][token].tolist()) for side in (expected, actual))
        margin = max(distance(set(c), choice_ME[token], groups) for c in (right, chosen))
        limit = float(limits_M[token])
        ties.append(Tie(token, right, chosen, margin, limit, None, None, margin <= limit))
    margins = [lead(row, groups, expected[0].shape[1]) for row in choice_ME]
    assert case.layer is not None
    return RoutingRecord(case.name, case.layer, len(agree), margins, agree, ties)


def bound_effect(
    tie: Tie,
    actual: tuple[Array, Array],
    expected: tuple[Array, Array],
    h_MD: Array,
    y_MD: Array,
    output: ExpertOutput,
) -> float:
    """The most by which a token's y may differ for its choice of experts, relative to y's norm."""
    weights = [
        dict(zip(experts[tie.token].tolist(), gates[tie.token].tolist(), strict=True))
        for experts, gates in (actual, expected)
    ]
    h_1D, total = h_MD[tie.token : tie.token + 1], 0.0
    for expert in sorted(set(tie.expected) | set(tie.chosen)):
        change = abs(weights[0].get(expert, 0.0) - weights[1].get(expert, 0.0))
        total += change * float(np.linalg.norm(output(expert, h_1D).astype(np.float64)))
    return total / max(float(np.linalg.norm(y_MD[tie.token].astype(np.float64))), 1e-30)


def agreed_weights(
    actual: tuple[Array, Array], expected: tuple[Array, Array], agree: list[bool]
) -> list[Array]:
    """Both sides' weights of the tokens that agree, in ascending order of experts."""
    return [
        np.take_along_axis(weights, np.argsort(experts, axis=-1), axis=-1)[np.array(agree)]
        for experts, weights in (actual, expected)
    ]


def lead(choice_E: Array, groups: ExpertGroups, k: int) -> float:
    """The lead of the last chosen expert's score over the first not chosen, among those allowed.

    Where groups are chosen first, the smaller of that and the last kept group's lead.
    """
    by_group = choice_E.reshape(groups.count, -1).astype(np.float64)
    best = np.sort(by_group, axis=-1)[:, -BEST_OF_GROUP[groups.score] :].sum(axis=-1)
    order = np.argsort(-best, kind="stable")
    allowed = np.sort(by_group[order[: groups.kept]], axis=None)[::-1]
    leads = [allowed[k - 1] - allowed[k]] if k < len(allowed) else []
    if groups.kept < groups.count:
        leads.append(best[order[groups.kept - 1]] - best[order[groups.kept]])
    return float(min(leads, default=math.inf))


def distance(chosen: set[int], choice_E: Array, groups: ExpertGroups) -> float:
    """How much smaller some score is than one that it was preferred to: 0 for the right experts.

    The smallest such gap over all selections of groups that might have been kept.
    """
    by_group = choice_E.reshape(groups.count, -1)
    scores = np.sort(by_group, axis=-1)[:, -BEST_OF_GROUP[groups.score] :].sum(axis=-1)
    least = math.inf
    for kept in map(list, combinations(range(groups.count), groups.kept)):
        left_out = np.delete(scores, kept).max(initial=-math.inf)
        gap = max(0.0, float(left_out - scores[kept].min()))
        allowed = np.full_like(by_group, -math.inf)
        allowed[kept] = by_group[kept]
        order = np.argsort(-allowed, axis=None, kind="stable")
        swapped = list(chosen ^ set(order[: len(chosen)].tolist()))
        if swapped:
            values = allowed.ravel()[swapped]
            gap = max(gap, float(values.max() - values.min()))
        least = min(least, gap)
    return least
