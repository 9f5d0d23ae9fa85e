"""How two tensors, and two routings, are compared: the same way in every parity table."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from graphs.spec import Precision
from graphs.tensorfile import Array

# Largest accepted max|a−b|/max|b| (fp32) or relative RMS (others).
FP32_OUTPUT, FP32_ROWS = 1e-5, 5e-6
RMS: dict[Precision, float] = {"fp8": 2e-3, "bf16": 5e-3}
# Of the whole chain running freely at fp8, where flips of e4m3 rounding add up over the layers.
FP8_CHAIN = 2e-2

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


def compare(
    case: str,
    tensor: str,
    found: Array,
    expected: Array,
    precision: Precision,
    remark: str = "",
    rms: Mapping[Precision, float] = RMS,
) -> Row:
    """Errors over the whole tensor, in float64; a value that is not finite fails."""
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
        limit = rms[precision]
        passed = rms_error <= limit
    return Row(case, tensor, max_error, rms_error, limit, passed, remark)


def compare_routing(
    case: str,
    found: tuple[Array, Array],
    expected: tuple[Array, Array],
    choice_ME: Array,
    precision: Precision,
) -> tuple[list[Row], Array]:
    """Rows for experts [M,K] and their weights [M,K], and which tokens chose the same experts [M].

    Experts are compared as sets. A difference between experts whose scores for choosing
    (`choice_ME`, bias included) lie within the precision's noise is a tie, not an error.
    """
    same = np.array([set(a) == set(b) for a, b in zip(found[0], expected[0], strict=True)])
    worst = 0.0
    for row in np.flatnonzero(~same):
        swapped = list(set(found[0][row]) ^ set(expected[0][row]))
        scores = choice_ME[row, swapped]
        worst = max(worst, float(scores.max() - scores.min()))
    ties, passed = int((~same).sum()), worst <= TIE_MARGIN[precision]
    remark = f"{ties} of {len(same)} tokens tied within {worst:.1e}" if ties else "same experts"
    rows = [Row(case, "experts", worst, worst, TIE_MARGIN[precision], passed, remark)]
    ordered = [
        np.take_along_axis(weights, np.argsort(experts, axis=-1), axis=-1)[same]
        for experts, weights in (found, expected)
    ]
    rows.append(compare(case, "expert_weights", ordered[0], ordered[1], precision))
    return rows, same
