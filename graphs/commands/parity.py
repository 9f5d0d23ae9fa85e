"""`python -m graphs parity|report|standalone`: graphs against their goldens."""

from pathlib import Path
from typing import Annotated

import typer

from graphs.cli import wide_console
from graphs.contract.spec import GRAPHS, GraphName
from graphs.parity.graphs import graph_parity
from graphs.report.merge import merge
from graphs.report.page import save_page
from graphs.report.terminal import failures, show, summary


def parity(
    build: Annotated[
        Path, typer.Argument(help="A build folder with goldens: build/MODEL/PRECISION.")
    ],
    threads: Annotated[int, typer.Option(help="ONNX Runtime's threads; 0: one per core.")] = 0,
) -> None:
    """Replay each graph's goldens in plain ONNX Runtime, tap by tap; exit status 1 past tolerance.

    Writes the findings to BUILD/parity/graphs.json, of which `report` makes a page.
    """
    fragment = graph_parity(build, threads)
    fragment.save(build)
    if not show(wide_console(), fragment):
        raise typer.Exit(1)


def report(
    builds: Annotated[
        list[Path],
        typer.Argument(help="Build folders of one model on which both parity commands ran."),
    ],
    out: Annotated[Path, typer.Option(help="Folder for report.json and report.html.")],
) -> None:
    """Join the findings of these builds' parity runs in a report; exit status 1 if one failed."""
    merged = merge(builds)
    paths = merged.save(out), save_page(merged, out)
    console = wide_console()
    console.print(summary(merged))
    for line in (*failures(merged), *map(str, paths)):
        console.print(line, soft_wrap=True)
    if not merged.passed:
        raise typer.Exit(1)


def standalone(
    build: Annotated[
        Path, typer.Argument(help="A build folder with goldens: build/MODEL/PRECISION.")
    ],
    graph: Annotated[
        GraphName, typer.Argument(metavar="TYPE", help=f"Graph: {', '.join(GRAPHS)}.")
    ],
    layer: Annotated[
        int | None, typer.Option(help="Layer whose weights the graph gets; none for head.")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Folder to write. Default: BUILD/standalone/TYPE_LAYER."),
    ] = None,
    case: Annotated[
        str | None,
        typer.Option(help="Golden, as dense_000_decode. Default: the layer's first by name."),
    ] = None,
) -> None:
    """Write a graph with one layer's weights and golden for Polygraphy; print commands to run."""
    # onnxscript takes 0.6 s, which the other commands need not wait
    from graphs.parity.standalone import write_standalone

    print(write_standalone(build, graph, layer, out, case).script)
