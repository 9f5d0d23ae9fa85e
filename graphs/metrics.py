"""How two tensors, and two routings, are compared: the same way in every parity table."""

import math
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from graphs.gates import BEST_OF_GROUP, GroupScore
from graphs.spec import Precision
from graphs.tensorfile import Array

# Largest accepted max|a−b|/max|b| (fp32) or relative RMS (others).
FP32_OUTPUT, FP32_ROWS = 1e-5, 5e-6
RMS: dict[Precision, float] = {"fp8": 2e-3, "bf16": 5e-3}
# Of what runs freely at fp8: a block, or the whole chain. Where an activation lies on the border of
# two e4m3 values, the order of a sum decides, and every such flip makes others further on.
FP8_FREE = 2e-2

# Two experts whose biased scores are closer than this may change places: rounding decides.
TIE_MARGIN: dict[Precision, float] = {"fp32": 1e-5, "bf16": 2e-2, "fp8": 2e-3}


@dataclass(frozen=True)
class Row:
    """One tensor's line of a parity table."""

    case: str
    tensor: str
    max_error: float  # max|a−b| / max|b|
    rms_error: float  # ‖a−b‖ / ‖b‖
    limit: float
    passed: bool
    remark: str = ""

    @property
    def compared(self) -> bool:
        """Whether anything was; a line of `not_run` only says what was not."""
        return not math.isnan(self.limit)


def not_run(case: str, remark: str) -> Row:
    """A line for what a build has no golden of, so that the table does not keep quiet about it."""
    return Row(case, "", math.nan, math.nan, math.nan, True, remark)


def compare(
    case: str,
    tensor: str,
    found: Array,
    expected: Array,
    precision: Precision,
    remark: str = "",
    free: bool = False,
) -> Row:
    """Errors over the whole tensor, in float64; a value that is not finite fails.

    `free`: whether it was computed on the graph's own activations all along.
    """
    a, b = found.astype(np.float64), expected.astype(np.float64)
    if a.shape != b.shape:
        raise ValueError(f"{case} {tensor}: shape {b.shape} expected, found {a.shape}")
    difference = np.abs(a - b)
    max_error = float(difference.max(initial=0)) / max(float(np.abs(b).max(initial=0)), 1e-30)
    rms_error = float(np.linalg.norm(difference)) / max(float(np.linalg.norm(b)), 1e-30)
    if precision == "fp32":
        limit = FP32_ROWS if tensor in ("new", "rows") else FP32_OUTPUT
        passed = max_error <= limit
    else:
        limit = RMS[precision]
        if free and precision == "fp8":
            limit, remark = FP8_FREE, ", ".join(filter(None, (remark, "free-running")))
        passed = rms_error <= limit
    return Row(case, tensor, max_error, rms_error, limit, passed, remark)


@dataclass(frozen=True)
class Groups:
    """Of experts: how many there are, and how many of them may serve a token."""

    count: int
    kept: int
    score: GroupScore


def compare_routing(
    case: str,
    found: tuple[Array, Array],
    expected: tuple[Array, Array],
    choice_ME: Array,
    groups: Groups,
    precision: Precision,
) -> tuple[list[Row], Array]:
    """Rows for experts [M,K] and their weights [M,K], and which tokens chose the same experts [M].

    Experts are compared as sets. A difference between experts whose scores for choosing
    (`choice_ME`, bias included), or between groups whose scores, lie within the precision's noise
    is a tie, not an error.
    """
    same = np.array([set(a) == set(b) for a, b in zip(found[0], expected[0], strict=True)])
    worst = 0.0
    for row in np.flatnonzero(~same):
        chosen = (set(experts[row].tolist()) for experts in (found[0], expected[0]))
        worst = max(worst, *(_distance(c, choice_ME[row], groups) for c in chosen))
    ties, passed = int((~same).sum()), worst <= TIE_MARGIN[precision]
    remark = f"{ties} of {len(same)} tokens tied within {worst:.1e}" if ties else "same experts"
    rows = [Row(case, "experts", worst, worst, TIE_MARGIN[precision], passed, remark)]
    ordered = [
        np.take_along_axis(weights, np.argsort(experts, axis=-1), axis=-1)[same]
        for experts, weights in (found, expected)
    ]
    rows.append(compare(case, "expert_weights", ordered[0], ordered[1], precision))
    return rows, same


def _distance(chosen: set[int], choice_E: Array, groups: Groups) -> float:
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
