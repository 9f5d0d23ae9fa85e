"""The summary on a terminal: a line per build, and the first bad tap of each that failed."""

from collections.abc import Iterator

from rich.console import Console
from rich.table import Table
from rich.text import Text

from graphs.parity.findings import FindingsSource, Fragment
from graphs.report.merge import BuildFindings, ParityReport
from graphs.report.wording import first_bad_sentences, limit_share, notable, number, where

COLORS = {"passed": "green", "failed": "bold red"}
SOURCE_TITLES: dict[FindingsSource, str] = {
    "graphs": "each graph alone",
    "chain": "blocks and chain",
}


def summary(report: ParityReport, title: str = "parity") -> Table:
    """A line per build."""
    table = Table(title=f"{report.model}: {title}")
    table.add_column("precision")
    for column in ("compared", "failed"):
        table.add_column(column, justify="right")
    table.add_column("first bad, or nearest its limit")
    for column in ("error ÷ limit", "ties", "range warnings"):
        table.add_column(column, justify="right")
    table.add_column("verdict")
    for build in report.builds:
        near = notable(build)
        table.add_row(
            build.precision,
            f"{len(build.rows):,}",
            f"{sum(not row.passed for row in build.rows):,}",
            "–" if near is None else Text(f"{near.tap}, {where(near)}"),
            "–" if near is None else number(limit_share(near)),
            f"{len(build.ties):,}",
            f"{len(build.ranges):,}",
            Text(build.verdict, COLORS[build.verdict]),
        )
    return table


def failures(report: ParityReport) -> Iterator[Text]:
    """What went wrong first in each build that failed, the likely cause, and what was left out."""
    for build in report.builds:
        if sentences := first_bad_sentences(build):
            yield Text(f"{build.precision}, first bad tap: ", "bold red") + Text(
                " ".join(sentences)
            )
        for hint in build.hints:
            yield Text("likely cause: ", "bold") + Text(
                f"{hint.text} {hint.evidence} [{hint.cause}; {hint.tap}, {hint.case}]"
            )
        for reason in build.not_run:
            yield Text(f"{build.precision}, not compared: {reason}")


def show(console: Console, fragment: Fragment) -> bool:
    """Print one parity command's findings; returns whether all are within their limits."""
    build = BuildFindings(fragment.precision, (fragment,))
    report = ParityReport(fragment.model, (build,))
    console.print(summary(report, SOURCE_TITLES[fragment.source]))
    for line in failures(report):
        console.print(line, soft_wrap=True)
    return report.passed
