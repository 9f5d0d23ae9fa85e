"""The page's part on one build, section by section."""

import re
from collections.abc import Iterator, Sequence

from graphs.parity.findings import Hint
from graphs.report.error_plots import layer_figures, tap_figures
from graphs.report.figures import FAILED, badge, table
from graphs.report.fp8_table import saturation_table
from graphs.report.markup import Markup, element, join
from graphs.report.merge import BuildFindings
from graphs.report.routing_tables import routing_table, tie_table
from graphs.report.wording import (
    ERROR_NAMES,
    count,
    first_bad_sentences,
    limit_share,
    limit_text,
    number,
    where,
)


def section(build: BuildFindings) -> Markup:
    """Everything of one build."""
    return element(
        "section",
        element("h2", build.precision, badge(build.verdict)),
        *_findings(build),
        *_errors(build),
        *_fp8(build),
        *_routing(build),
        *_ranges(build),
        *_not_run(build),
        _comparisons(build),
        id=build.precision,
    )


def _findings(build: BuildFindings) -> Iterator[Markup]:
    """The first bad tap and the hints, where there are any."""
    if sentences := first_bad_sentences(build):
        first, *others = sentences
        lines = element("p", element("b", "First bad tap: "), first), element("p", *others)
        yield element("div", *lines, *_hints(build.hints), class_="panel bad")
    elif build.hints:
        yield element("div", *_hints(build.hints), class_="panel")


def _hints(hints: Sequence[Hint]) -> Iterator[Markup]:
    for hint in hints:
        yield element(
            "p",
            element("b", "Likely cause: "),
            f"{hint.text} ",
            element(
                "span", f"{hint.evidence} [{hint.cause}; {hint.tap}, {hint.case}]", class_="dim"
            ),
        )
    if not hints:
        yield element("p", "It looks like none of the known causes.", class_="dim")


def _errors(build: BuildFindings) -> Iterator[Markup]:
    yield from _plots(
        "Error per tap",
        "The line of a mode runs through its worst layer; pale dots are its other layers.",
        tap_figures(build),
    )
    yield from _plots(
        "Error per layer",
        "Of each layer the tensor that uses most of its limit, whichever that is; at 1 it fails.",
        layer_figures(build),
    )


def _plots(title: str, caption: str, figures: list[Markup]) -> Iterator[Markup]:
    if figures:
        yield element("h3", title)
        yield element("p", caption, class_="caption")
        yield element("div", *figures, class_="figures")


def _fp8(build: BuildFindings) -> Iterator[Markup]:
    if not build.fp8:
        return
    yield element("h3", "FP8 scales and saturation")
    yield element(
        "p",
        "A row is a token's activations or a weight's output channel, and has one scale. A "
        "token's is a 448th of its largest activation, so each has at least one value at ±448, and "
        "many more mean a flat row; a weight's comes from its blocks in the checkpoint. Values "
        "flushed to 0 are at least 458,752 times smaller than their row's largest; how many of a "
        "weight packing flushed cannot be told from it.",
        class_="caption",
    )
    yield saturation_table(build.fp8)


def _routing(build: BuildFindings) -> Iterator[Markup]:
    if not build.routing:
        return
    yield element("h3", "Routing")
    yield element(
        "p",
        "Experts are compared as sets. A margin is by how much the last expert that the reference "
        "chose led the first that it did not; below the limit, rounding decides, and a difference "
        "is a tie, no error.",
        class_="caption",
    )
    yield routing_table(build.routing)
    if build.ties:
        yield element(
            "p",
            "Every token that chose other experts. Bound and effect are relative to the norm of "
            "the token's output.",
            class_="caption",
        )
        yield tie_table(build.ties)


def _ranges(build: BuildFindings) -> Iterator[Markup]:
    yield element("h3", "Range warnings")
    if not build.ranges:
        yield element("p", "None.", class_="caption")
        return
    rows = [(w.case, w.tap, w.rule, w.text) for w in build.ranges]
    yield table(("case", "tap", "rule", "what"), rows, kind="sortable")


def _not_run(build: BuildFindings) -> Iterator[Markup]:
    if build.not_run:
        yield element("h3", "Not compared")
        yield element("ul", *(element("li", reason) for reason in build.not_run))


def _comparisons(build: BuildFindings) -> Markup:
    """All of them, closed at first."""
    lines = (
        (
            where(r),
            fragment.source,
            r.graph,
            r.tap,
            _symbol(r.symbol),
            r.kind,
            number(r.max_error),
            number(r.rms_error),
            f"{r.metric} {limit_text(r.limit)}",
            number(limit_share(r)),
            ", ".join(map(str, r.worst)),
            "ok" if r.passed else FAILED,
            r.remark,
        )
        for fragment in build.fragments
        for r in fragment.rows
    )
    columns = (
        "case",
        "run by",
        "graph",
        "tap",
        "symbol",
        "kind",
        ERROR_NAMES["max"],
        ERROR_NAMES["rms"],
        "limit",
        "error ÷ limit",
        "largest at",
        "",
        "remark",
    )
    return element(
        "details",
        element("summary", f"All {count(len(build.rows), 'comparison')}"),
        table(columns, lines, numeric=range(7, 11), kind="sortable filtered"),
    )


def _symbol(text: str) -> Markup:
    """ĉ^Q and Δ_attn with their marks raised and lowered."""
    pieces = re.split(r"([\^_]\w+)", text)
    raised = {"^": "sup", "_": "sub"}
    return join(*(element(raised[p[0]], p[1:]) if p[:1] in raised else p for p in pieces))
