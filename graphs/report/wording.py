"""Words for findings, in the page and on the terminal: numbers, names, and the first bad tap."""

import math
from collections.abc import Iterable, Sequence

from graphs.parity.findings import Metric, TapComparison
from graphs.report.merge import BuildFindings

ERROR_NAMES: dict[Metric, str] = {"max": "max|a−b| / max|b|", "rms": "relative RMS"}
NOT_FINITE = "not finite"


def number(value: float, digits: int = 2) -> str:
    """A number with this many significant digits; powers of ten as 1.2e-5."""
    if not math.isfinite(value):
        return NOT_FINITE
    if value == 0:
        return "0"
    mantissa, power = f"{value:.{digits - 1}e}".split("e")
    exponent = int(power)
    if -3 <= exponent <= 3:
        return f"{value:.{max(0, digits - 1 - exponent)}f}"
    return f"{mantissa}e{exponent}"


def limit_text(value: float) -> str:
    """A limit as it was set, with no zeros behind: 0.02, 5e-6."""
    return f"{value:.2g}".replace("e-0", "e-")


def share(part: int, whole: int) -> str:
    """A share in per cent; one that is not 0 never reads as 0."""
    if not whole:
        return "–"
    value = 100 * part / whole
    return "0 %" if not part else "< 0.001 %" if value < 1e-3 else f"{number(value)} %"


def count(amount: int, noun: str) -> str:
    return f"{amount:,} {noun}" if amount == 1 else f"{amount:,} {noun}s"


def where(row: TapComparison) -> str:
    """The case, and whether its linear layers were fed."""
    return f"{row.case}, fed" if row.fed else row.case


def limit_share(row: TapComparison) -> float:
    """The error as a share of its limit; infinite where it is not finite."""
    if math.isnan(row.error):
        return math.inf
    return row.error / row.limit if row.limit else math.inf if row.error else 0.0


def closest(rows: Iterable[TapComparison]) -> TapComparison | None:
    """The comparison that uses most of its limit."""
    return max(rows, key=limit_share, default=None)


def notable(build: BuildFindings) -> TapComparison | None:
    """The first bad comparison, or else the one that uses most of its limit."""
    return build.first_bad or closest(build.rows)


def last_good(rows: Sequence[TapComparison], bad: TapComparison) -> TapComparison | None:
    """The tensor right before the bad one in the same run that is within its limit."""
    before = [
        r
        for r in rows
        if (r.case, r.graph, r.fed) == (bad.case, bad.graph, bad.fed)
        and r.passed
        and r.order < bad.order
    ]
    return max(before, key=lambda r: r.order, default=None)


def first_bad_sentences(build: BuildFindings) -> list[str]:
    """Sentences on what went wrong first; none if nothing did."""
    bad = build.first_bad
    if bad is None:
        return [
            f"token {tie.token} of {routing.case} chose other experts by a margin of "
            f"{number(tie.margin)}, limit {limit_text(tie.limit)}."
            for routing, tie in build.ties
            if not tie.passed
        ][:1]
    symbol = f" ({bad.symbol})" if bad.symbol and bad.symbol != bad.tap else ""
    place = "" if bad.layer is None else f", layer {bad.layer}"
    at = f", largest at index {bad.worst}" if bad.worst else ""
    lines = [
        f"{bad.tap}{symbol} in {where(bad)}{place}: {ERROR_NAMES[bad.metric]} {number(bad.error)}, "
        f"limit {limit_text(bad.limit)}{at}."
    ]
    if bad.remark:
        lines.append(f"{bad.remark}.")
    source = next(f for f in build.fragments if bad in f.rows)
    if good := last_good(source.rows, bad):
        lines.append(f"Right before it, {good.tap} is within its limit: {number(good.error)}.")
    return lines
