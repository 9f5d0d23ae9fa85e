"""Tables of whether tokens chose the same experts, and by how much the choice was decided."""

import math
from collections.abc import Sequence

from graphs.parity.findings import RoutingRecord, Tie
from graphs.report.figures import FAILED, table
from graphs.report.markup import Markup
from graphs.report.wording import limit_text, number, share


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
            _experts(tie.expected, tie.chosen),
            _experts(tie.chosen, tie.expected),
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
