"""`python -m export`: checkpoint → graphs, packed weights and goldens in a build folder."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from export.checkpoint import Checkpoint, CheckpointError
from export.golden import write_goldens
from export.pack import pack
from export.to_onnx import export_graphs
from graphs.cli import make_app, progress_bar, run
from graphs.config import load_raw_config
from graphs.spec import Precision

app = make_app("Checkpoint → ONNX graphs, packed weights and goldens.")

CheckpointDir = Annotated[
    Path, typer.Option("--checkpoint", help="Folder with config.json, index and shards.")
]
BuildDir = Annotated[Path, typer.Option("--out", help="Build folder, build/<model>/<precision>.")]


@app.command()
def graphs(
    out: BuildDir,
    precision: Annotated[Precision, typer.Option(help="Of weights and activations.")],
    checkpoint: Annotated[
        Path | None, typer.Option(help="Folder with config.json; no weight is read.")
    ] = None,
    preset: Annotated[str | None, typer.Option(help="Name of a config that comes along.")] = None,
) -> None:
    """Export the four graphs and spec.json, from shapes alone."""
    source = preset if checkpoint is None else checkpoint
    if source is None or (checkpoint is not None and preset is not None):
        raise typer.BadParameter("exactly one of --checkpoint and --preset is needed")
    spec = export_graphs(load_raw_config(source), precision, out)
    for graph in spec.graphs.values():
        print(out / graph.file)


@app.command()
def weights(checkpoint: CheckpointDir, out: BuildDir) -> None:
    """Pack a checkpoint into the layout the engines read."""
    opened = Checkpoint.open(checkpoint)
    for name in opened.unknown:
        print(f"not used: {name}", file=sys.stderr)
    with progress_bar() as progress:
        task = progress.add_task("packing", total=None)

        def show(file: str, done: int, total: int) -> None:
            progress.update(task, description=file, completed=done, total=total)

        for path in pack(opened, out, show):
            print(path)


@app.command()
def golden(checkpoint: CheckpointDir, out: BuildDir) -> None:
    """Write what the torch reference computes for fixed inputs."""
    for path in write_goldens(Checkpoint.open(checkpoint), out):
        print(path)


if __name__ == "__main__":
    run(app, CheckpointError)
