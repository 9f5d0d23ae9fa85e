"""`python -m graphs budget`: the cost of steps and sequences on GPUs, and of built engines."""

from pathlib import Path
from typing import Annotated

import typer

from graphs.budget.gpus import GPUS, find_gpu
from graphs.budget.show import Show, show_built, show_models
from graphs.cli import wide_console
from graphs.contract.config import PRESETS
from graphs.contract.manifest import Profile
from graphs.contract.shapes import check_profile
from graphs.contract.spec import Precision


def budget(
    sources: Annotated[
        list[str] | None,
        typer.Argument(
            help="Presets (k2), config.json files, or checkpoints' folders; with --engines, "
            "build/MODEL/PRECISION/FOLDER/manifest.json. By default: memory and cards of every "
            "preset."
        ),
    ] = None,
    precision: Annotated[Precision, typer.Option(help="Precision of the packed weights.")] = "fp8",
    gpu: Annotated[
        list[str] | None,
        typer.Option(help=f"GPU to show ({', '.join(GPUS)}); may be repeated. Default: all."),
    ] = None,
    batch: Annotated[int, typer.Option(help="Sequences of a decode step.")] = 8,
    tokens: Annotated[int, typer.Option(help="Tokens of a prefill step.")] = 128,
    context: Annotated[int, typer.Option(help="Cached rows of each sequence.")] = 4096,
    engines: Annotated[
        bool,
        typer.Option(
            "--engines",
            help="Compare built engines with their budgets; exit status 1 where one takes over "
            "10 % more.",
        ),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print every figure as JSON.")] = False,
) -> None:
    """Show bytes, operations, time and memory of steps, computed from GPUs' public figures.

    Only --engines shows measured figures, which are the builder's.
    """
    profile = Profile(batch, tokens, context)
    check_profile(profile)
    gpus = [find_gpu(name) for name in gpu or GPUS]
    output = Show(wide_console(), as_json)
    if engines:
        if not show_built(output, [Path(source) for source in sources or ()]):
            raise typer.Exit(1)
    else:
        presets = sorted(path.stem for path in PRESETS.glob("*.json"))
        show_models(output, sources or presets, precision, profile, gpus, steps=bool(sources))
