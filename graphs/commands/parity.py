"""`python -m graphs parity|report|standalone`: graphs against their goldens, and what was found."""

from pathlib import Path
from typing import Annotated

import typer

from graphs.cli import wide_console
from graphs.contract.spec import GRAPHS, GraphName
from graphs.parity.graphs import graph_parity
from graphs.report.merge import merge
from graphs.report.page import save_page
from graphs.report.terminal import failures, show, summary

app = typer.Typer()


@app.command()
def parity(
    build: Annotated[
        Path, typer.Argument(help="A build folder with goldens: build/MODEL/PRECISION.")
    ],
    threads: Annotated[int, typer.Option(help="ONNX Runtime's threads; 0: one per core.")] = 0,
) -> None:
    """Replay each graph's goldens in plain ONNX Runtime, tap by tap; exit status 1 past tolerance.

    What was found goes to BUILD/parity/graphs.json, of which `report` makes a page.
    """
    fragment = graph_parity(build, threads)
    fragment.save(build)
    if not show(wide_console(), fragment):
        raise typer.Exit(1)


@app.command()
def report(
    builds: Annotated[
        list[Path],
        typer.Argument(help="Build folders of one model on which both parity commands ran."),
    ],
    out: Annotated[Path, typer.Option(help="Folder for report.json and report.html.")],
) -> None:
    """What the parity runs of these builds found, in one report; exit status 1 where one failed."""
    found = merge(builds)
    paths = found.save(out), save_page(found, out)
    console = wide_console()
    console.print(summary(found))
    for line in (*failures(found), *map(str, paths)):
        console.print(line, soft_wrap=True)
    if not found.passed:
        raise typer.Exit(1)


@app.command()
def standalone(
    build: Annotated[
        Path, typer.Argument(help="A build folder with goldens: build/MODEL/PRECISION.")
    ],
    graph: Annotated[GraphName, typer.Argument(metavar="TYPE", help=f"{', '.join(GRAPHS)}.")],
    layer: Annotated[
        int | None, typer.Option(help="The layer whose weights it gets; none for head.")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="The folder to write, instead of BUILD/standalone/TYPE_LAYER."),
    ] = None,
    case: Annotated[
        str | None,
        typer.Option(help="The golden, as dense_000_decode, instead of the layer's first by name."),
    ] = None,
) -> None:
    """A graph with one layer's weights and its golden for Polygraphy, and what to run on it."""
    from graphs.parity.standalone import (
        write_standalone,  # onnxscript, 0.6 s that no other command needs
    )

    print(write_standalone(build, graph, layer, out, case).script)
