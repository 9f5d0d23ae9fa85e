"""report.html: one file with its style, script and plots inside, that asks nothing of a network."""

from pathlib import Path

from graphs.contract.files import write_text
from graphs.report.figures import badge, table
from graphs.report.markup import Markup, element
from graphs.report.merge import ParityReport
from graphs.report.sections import section
from graphs.report.wording import limit_share, notable, number, share, where

HERE = Path(__file__).parent

READING = (
    "a is what the graph gave, b the reference. Errors are over a whole tensor: max|a−b| / max|b|, "
    "which fp32 is held to, and the relative RMS ‖a−b‖ / ‖b‖, which bf16 and fp8 are held to. "
    "Experts are held to the margin by which others were chosen. A tap is an intermediate of a "
    "graph, in the order of the dataflow; a copy of the graph gives them all, so what is compiled "
    "has none. “Fed” means given the reference's own values: every FP8 linear layer its input, or, "
    "on the backend, a MoE block's experts what its graph should have made. What differs then was "
    "made right there, and not by an e4m3 value that fell to the other side further up. 0 and what "
    "is not finite have no logarithm; they lie at a plot's lower and upper edge. Points have "
    "their figures as tooltips."
)


def save_page(report: ParityReport, folder: Path) -> Path:
    """Write report.html; returns its path."""
    path = folder / "report.html"
    write_text(path, page(report))
    return path


def page(report: ParityReport) -> str:
    """The whole document."""
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("title", f"Parity of {report.model}: {report.verdict}"),
        element("style", _file("page.css")),
    )
    links = (element("a", b.precision, href=f"#{b.precision}") for b in report.builds)
    top = element(
        "header",
        element("h1", f"Parity of {report.model}", badge(report.verdict, id="verdict")),
        element("nav", *links),
    )
    main = element(
        "main",
        _summary(report),
        *(section(build) for build in report.builds),
    )
    script = element("script", _file("page.js"))
    return "<!DOCTYPE html>\n" + element(
        "html", head, element("body", top, main, script), lang="en"
    )


def _file(name: str) -> Markup:
    """Ours, and without `</`, so it may stand in the page as it is."""
    return Markup((HERE / name).read_text(encoding="utf-8"))


def _summary(report: ParityReport) -> Markup:
    rows = []
    for build in report.builds:
        near = notable(build)
        tokens = [agree for routing in build.routing for agree in routing.agree]
        rows.append(
            (
                element("a", build.precision, href=f"#{build.precision}"),
                f"{len(build.rows):,}",
                f"{sum(not r.passed for r in build.rows):,}",
                "–" if near is None else f"{near.tap}, {where(near)}",
                "–" if near is None else number(limit_share(near)),
                share(sum(tokens), len(tokens)),
                f"{len(build.ties):,}",
                f"{len(build.ranges):,}",
                f"{len(build.not_run):,}",
                badge(build.verdict),
            )
        )
    columns = (
        "precision",
        "compared",
        "failed",
        "first bad tap, or nearest its limit",
        "error ÷ limit",
        "tokens with the same experts",
        "ties",
        "range warnings",
        "not compared",
        "verdict",
    )
    return element(
        "section",
        table(columns, rows, numeric=(2, 3, 5, 6, 7, 8, 9)),
        element("details", element("summary", "How to read this"), element("p", READING)),
    )
