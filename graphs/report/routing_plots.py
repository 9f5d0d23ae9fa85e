"""Whether tokens chose the same experts, and by how much the choice was decided."""

import math
from collections.abc import Sequence

from graphs.parity.findings import RoutingRecord, TapComparison, Tie
from graphs.report.figures import FAILED, figure, table
from graphs.report.markup import Markup
from graphs.report.svg import SUPERSCRIPT, Bar, bar_chart
from graphs.report.wording import limit_text, number, share

PER_DECADE = 4  # bars of the histogram
LEAST = 1e-8  # margins below it, and 0, are counted with it


def tie_limit(rows: Sequence[TapComparison]) -> float | None:
    """The largest margin of a tie: what the chosen experts are held to."""
    return max((row.limit for row in rows if row.tap == "experts"), default=None)


def margin_figure(routing: Sequence[RoutingRecord], limit: float | None) -> Markup:
    """A histogram of the reference's margins, the tokens that chose other experts in front."""
    tokens = [pair for r in routing for pair in zip(r.margins, r.agree, strict=True)]
    places = [(_place(margin), agree) for margin, agree in tokens if math.isfinite(margin)]
    marked = [] if limit is None else [_place(limit)]
    every = [place for place, _ in places] + marked
    first, last = min(every, default=0), max(every, default=0)
    bars = []
    for place in range(first, last + 1):
        same, other = places.count((place, True)), places.count((place, False))
        start, end = 10 ** (place / PER_DECADE), 10 ** ((place + 1) / PER_DECADE)
        title = f"margin {number(start)} to {number(end)}: {same} agree, {other} differ"
        decade, rest = divmod(place, PER_DECADE)
        label = "" if rest else f"10{str(decade).translate(SUPERSCRIPT)}"
        bars.append(Bar([(other, "differ"), (same, "agree")], title, label))
    at = None if limit is None else PER_DECADE * math.log10(limit) - first
    plot = bar_chart("routing margins", bars, "margin of the last expert chosen", 620, limit=at)
    names = [("same experts", "agree"), ("other experts", "differ")]
    line = "" if limit is None else f"tie limit {limit_text(limit)}"
    return figure("tokens by the reference's margin", names, plot, line)


def _place(margin: float) -> int:
    return math.floor(PER_DECADE * math.log10(max(margin, LEAST)))


def routing_table(routing: Sequence[RoutingRecord]) -> Markup:
    """A line per case."""
    rows = []
    for r in routing:
        past = sum(not tie.passed for tie in r.ties)
        finite = [m for m in r.margins if math.isfinite(m)]
        rows.append(
            (
                r.case,
                str(r.layer),
                f"{r.tokens:,}",
                share(sum(r.agree), len(r.agree)),
                str(len(r.ties) - past),
                str(past),
                number(min(finite)) if finite else "–",
            )
        )
    columns = ("case", "layer", "tokens", "same experts", "ties", "past the limit", "least margin")
    return table(columns, rows, numeric=range(2, 8))


def tie_table(ties: Sequence[tuple[RoutingRecord, Tie]]) -> Markup:
    """A line per token that chose other experts."""
    rows = [
        (
            r.case,
            str(tie.token),
            _experts(tie.expected, tie.found),
            _experts(tie.found, tie.expected),
            number(tie.margin),
            limit_text(tie.limit),
            "–" if tie.bound is None else number(tie.bound),
            "–" if tie.effect is None else number(tie.effect),
            "tie" if tie.passed else FAILED,
        )
        for r, tie in ties
    ]
    columns = (
        "case",
        "token",
        "chosen by the reference alone",
        "by the graph alone",
        "margin",
        "limit",
        "bound of its effect",
        "measured effect",
        "",
    )
    return table(columns, rows, numeric=(2, 5, 6, 7, 8), kind="sortable")


def _experts(chosen: Sequence[int], other: Sequence[int]) -> str:
    return ", ".join(str(e) for e in sorted(set(chosen) - set(other))) or "–"
