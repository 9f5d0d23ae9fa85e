"""`python -m runtime bench`."""

from contextlib import closing
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import TimeElapsedColumn

from graphs.cli import progress_bar, wide_console
from runtime.benchmark.bench import bench as measure
from runtime.benchmark.cases import usual_batches, usual_lengths
from runtime.benchmark.table import notes, table
from runtime.commands.loading import load
from runtime.commands.options import BuildArgument, SizedOptions, require_writable, with_groups

TITLES = {"tensorrt": "TensorRT", "onnxruntime": "ONNX Runtime"}


@with_groups
def bench(
    build: BuildArgument,
    opening: SizedOptions,
    sequences: Annotated[
        list[int] | None,
        typer.Option(
            min=1,
            help="Sequences of a decode step; may be repeated.",
            show_default="1 and the most",
        ),
    ] = None,
    cached: Annotated[
        list[int] | None,
        typer.Option(
            min=0,
            help="Cached rows of each sequence; may be repeated.",
            show_default="1000, and CONTEXT less a prompt's chunk",
        ),
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Samples of each measurement.")] = 7,
    out: Annotated[Path | None, typer.Option(help="JSON file for every sample.")] = None,
) -> None:
    """Time each engine alone and the whole chain, decode and prefill, beside the GPU's roofline.

    Times come from CUDA events, where there is a GPU, and from the wall clock. Cases beyond a limit
    are left out and named.
    """
    options = opening.load_options()
    require_writable(out)
    chain = load(build, options)
    with closing(chain.backend), progress_bar(TimeElapsedColumn()) as progress:
        task = progress.add_task("measuring", total=None)
        report = measure(
            chain,
            TITLES[options.backend],
            sequences or usual_batches(chain),
            usual_lengths(chain) if cached is None else cached,
            rounds,
            lambda what: progress.update(task, description=what),
        )
    if out is not None:
        report.save(out)
    console = wide_console()
    console.print(table(report, f"{report.machine['device']}, {build}"))
    for note in notes(report):
        console.print(note, soft_wrap=True, highlight=False)
