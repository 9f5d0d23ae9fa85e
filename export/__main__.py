"""`python -m export`: checkpoint → graphs, packed weights and goldens in a build folder.

What needs torch is imported by the commands that use it: `record`, which every `make` runs, does
without.
"""

import sys
from pathlib import Path
from typing import Annotated

import typer

from export.checkpoint.errors import CheckpointError
from graphs.cli import byte_progress, make_app, run
from graphs.contract.config import load_raw_config
from graphs.contract.spec import Precision

app = make_app("Checkpoint → ONNX graphs, packed weights and goldens.")

CheckpointDir = Annotated[
    Path, typer.Option("--checkpoint", help="Folder with config.json, index and shards.")
]
BuildDir = Annotated[Path, typer.Option("--out", help="Build folder, build/<model>/<precision>.")]


@app.command()
def graphs(
    out: BuildDir,
    precision: Annotated[Precision, typer.Option(help="Number format of weights and activations.")],
    checkpoint: Annotated[
        Path | None, typer.Option(help="Folder with config.json; no weight is read.")
    ] = None,
    preset: Annotated[str | None, typer.Option(help="Name of a shipped config.")] = None,
) -> None:
    """Export the four graphs and spec.json, from shapes alone."""
    from export.engine.to_onnx import export_graphs

    source = preset if checkpoint is None else checkpoint
    if source is None or (checkpoint is not None and preset is not None):
        raise typer.BadParameter("expected exactly one of --checkpoint and --preset")
    spec = export_graphs(load_raw_config(source), precision, out)
    for graph in spec.graphs.values():
        print(out / graph.file)


@app.command()
def weights(
    checkpoint: CheckpointDir,
    out: BuildDir,
    workers: Annotated[
        int | None,
        typer.Option(min=1, help="Threads, each with one matrix in memory; default: cores + 2."),
    ] = None,
) -> None:
    """Pack a checkpoint into the layout the engines read; goes on where it was interrupted."""
    from export.checkpoint.open import Checkpoint
    from export.packing.pack import pack

    opened = Checkpoint.open(checkpoint)
    for rule, count in opened.ignored.items():
        print(f"not used: {count} tensors, {rule}", file=sys.stderr)
    for name in opened.unknown:
        print(f"not used: {name}, unknown to this architecture", file=sys.stderr)
    with byte_progress("packing") as (show, say):
        files = pack(opened, out, workers, show, lambda plan: say(plan.summary()))
    for path in files:
        print(path)


@app.command()
def record(checkpoint: CheckpointDir, out: BuildDir) -> None:
    """Record which checkpoint a build is made of; another one takes the first one's place.

    What followed from the first is removed: `weights` and `golden` make it anew.
    """
    from export.packing.record import record_checkpoint

    if replaced := record_checkpoint(checkpoint, out):
        print(replaced, file=sys.stderr)


@app.command()
def golden(
    checkpoint: CheckpointDir,
    out: BuildDir,
    blocks_only: Annotated[
        bool,
        typer.Option(
            "--blocks-only",
            help="Each layer alone, on random inputs: for models larger than memory.",
        ),
    ] = False,
) -> None:
    """Write what the torch reference computes for fixed inputs."""
    from export.checkpoint.open import Checkpoint
    from export.golden.layer import write_layer_goldens
    from export.golden.model import write_goldens

    write = write_layer_goldens if blocks_only else write_goldens
    for path in write(Checkpoint.open(checkpoint), out):
        print(path)


@app.command()
def synthetic(
    preset: Annotated[str, typer.Option(help="Name of a shipped config.")],
    out: Annotated[Path, typer.Option(help="Folder to write the checkpoint to.")],
    layers: Annotated[
        int | None, typer.Option(help="Number of layers; default: the preset's.")
    ] = None,
    dense: Annotated[
        int | None, typer.Option(help="Number of dense layers; the others are MoE.")
    ] = None,
    vocab: Annotated[int | None, typer.Option(help="Vocabulary size.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="The same seed gives the same bytes.")] = 0,
) -> None:
    """Write a checkpoint of random weights in a preset's format, to try things without one."""
    from export.synthetic.make import reduced, write_synthetic

    raw = reduced(load_raw_config(preset), layers, dense, vocab)
    with byte_progress("writing") as (show, _):
        files = write_synthetic(raw, out, seed, show)
    for path in files:
        print(path)


if __name__ == "__main__":
    run(app, CheckpointError)
