"""Values that 16 bits or an FP8 scale would lose, in what the reference computed.

ONNX Runtime's CPU provider computes fp16 in fp32, and the widened graphs hold fp32 where engines
hold 16 bits, so parity cannot see these. They are warnings: a golden shows what values a model has,
and whether they matter depends on where a build keeps 16 bits. The rules, on one tap:

1. not finite: NaN or infinity.
2. fp16 overflow: |x| ≥ 65,520 rounds to infinity. bf16 has fp32's range and is not concerned.
3. fp16 flush: 0 < |x| ≤ 2^−25 rounds to 0; below 2^−14 it has fewer than 11 bits.
4. fp16 norm: a norm's input whose square is infinite in fp16: |x| ≥ 255.9375 rounds to 256. The
   mean of squares is below the largest, so this comes first. Graphs made here keep norms in fp32.
5. FP8 scale at its floor: a row's peak / 448 is below SMALLEST_SCALE. A row of zeros is exact.
6. FP8 scale in fp16: a row's scale, cast to 16 bits behind the product, overflows or becomes 0.
7. FP8 outlier: over half of a row's values that are not 0 become 0 in e4m3, below peak / 458,752.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np

from graphs.contract.tensorfile import Array, TensorFile
from graphs.ops import MASKED
from graphs.ops.fp8_linear import E4M3_MAX, SMALLEST_SCALE

RangeRole = Literal["value", "norm_input", "fp8_input"]

NORM_INPUTS = ("x", "c_q", "c_kv", "x_mid", "hidden")
FP8_INPUTS = ("x_attn", "c_q_normed", "mix", "h", "product", "shared_product")

FP16_INFINITE = 65520.0  # half way from the largest value to the next
FP16_ZERO = 2.0**-25  # half of the smallest value; the tie goes to 0
FP16_SUBNORMAL = 2.0**-14
FP16_SQUARE_INFINITE = 255.9375  # half way to 256, the first whose square is
E4M3_ZERO = 2.0**-10  # half of e4m3's smallest value


@dataclass(frozen=True)
class RangeFinding:
    """count of total values, or rows, break a rule; worst is the value furthest out."""

    case: str
    tap: str
    rule: str
    count: int
    total: int
    worst: float
    text: str

    def __str__(self) -> str:
        return f"{self.case}: {self.tap}: {self.rule}: {self.text}"


def range_findings(case: str, tap: str, values: Array, *, role: RangeRole) -> list[RangeFinding]:
    """The findings of one tap, none where nothing is lost.

    values: of any shape; of a norm's or an FP8 linear layer's input, the last axis is one row.
    Masks, MASKED and sums with it, do not count.
    """
    wide = values.astype(np.float32, copy=False)
    finite = np.isfinite(wide)
    losses = [*_not_finite(wide, finite)]
    losses += _fp16(np.abs(wide[finite & (wide > MASKED / 2)]))
    if role != "value" and wide.size:
        rows = wide.reshape(-1, wide.shape[-1])
        rows = np.abs(rows[finite.reshape(rows.shape).all(axis=1)])
        losses += _norm(rows) if role == "norm_input" else _fp8(rows)
    return [
        RangeFinding(case, tap, rule, count, total, worst, f"{count:,} of {total:,} {text}")
        for rule, count, total, worst, text in losses
    ]


def golden_findings(golden: TensorFile) -> list[RangeFinding]:
    """The findings of all that the reference computed for one case of a single graph."""
    findings: list[RangeFinding] = []
    for name, values in golden.tensors.items():
        kind, _, tap = name.partition(".")
        if values.dtype != np.float32 or kind not in ("input", "tap"):
            continue
        role: RangeRole = "norm_input" if tap in NORM_INPUTS else "value"
        if tap in FP8_INPUTS and golden.metadata["precision"] == "fp8":
            role = "fp8_input"
        if tap == "mix":  # [B,H,S,V], of which a linear layer reads [B·S,H·V]
            values = values.transpose(0, 2, 1, 3).reshape(-1, values.shape[1] * values.shape[3])
        findings += range_findings(golden.path.stem, tap, values, role=role)
    return findings


_Loss = tuple[str, int, int, float, str]  # rule, count, total, worst, text


def _not_finite(wide: Array, finite: Array) -> Iterator[_Loss]:
    if count := int((~finite).sum()):
        worst = float(wide[~finite][0])
        yield "not finite", count, wide.size, worst, f"values are NaN or infinite, first {worst}"


def _fp16(sizes: Array) -> Iterator[_Loss]:
    """sizes: magnitudes, of any number of values."""
    over = sizes[sizes >= FP16_INFINITE]
    if over.size:
        worst = float(over.max())
        text = f"values become infinite in fp16, the largest {worst:.3g}"
        yield "fp16 overflow", over.size, sizes.size, worst, text
    flushed = sizes[(sizes > 0) & (sizes <= FP16_ZERO)]
    if flushed.size:
        worst = float(flushed.min())
        few_bits = int(((sizes > FP16_ZERO) & (sizes < FP16_SUBNORMAL)).sum())
        share = flushed.sum(dtype=np.float64) / sizes.sum(dtype=np.float64)
        text = (
            f"values become 0 in fp16, {share:.1g} of the sum of all, the smallest {worst:.3g}; "
            f"{few_bits:,} more lose bits"
        )
        yield "fp16 flush", flushed.size, sizes.size, worst, text


def _norm(rows: Array) -> Iterator[_Loss]:
    peaks = rows.max(axis=1)
    over = peaks[peaks >= FP16_SQUARE_INFINITE]
    if over.size:
        worst = float(over.max())
        text = f"rows have a value whose square is infinite in fp16, the largest {worst:.3g}"
        yield "fp16 norm", over.size, len(rows), worst, text


def _fp8(rows: Array) -> Iterator[_Loss]:
    rows = rows[rows.any(axis=1)]  # zeros stay zeros, whatever their scale
    peaks = rows.max(axis=1, initial=0)
    scales = peaks / np.float32(E4M3_MAX)
    floored = peaks[scales < SMALLEST_SCALE]
    if floored.size:
        worst = float(floored.min())
        text = f"rows have the least scale, {SMALLEST_SCALE:g}, though their peak is {worst:.3g}"
        yield "FP8 scale at its floor", floored.size, len(rows), worst, text
    outside = peaks[(scales >= FP16_INFINITE) | (scales <= FP16_ZERO)]
    if outside.size:
        worst = float(outside.max() if (outside >= 1).any() else outside.min())
        text = f"rows have a scale that is infinite or 0 in fp16, with a peak of {worst:.3g}"
        yield "FP8 scale in fp16", outside.size, len(rows), worst, text
    lost = (rows > 0) & (rows <= (np.maximum(scales, SMALLEST_SCALE) * E4M3_ZERO)[:, None])
    outliers = peaks[lost.sum(axis=1) * 2 > (rows > 0).sum(axis=1)]
    if outliers.size:
        worst = float(outliers.max())
        text = f"rows lose over half of their values to 0 in e4m3, next to a peak of {worst:.3g}"
        yield "FP8 outlier", outliers.size, len(rows), worst, text
