"""`python -m graphs compile|table`: engines from a build's graphs, and tables of built ones."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from graphs.cli import wide_console
from graphs.contract.manifest import ENGINE_MODES, Compiler, EngineRecord, Manifest, Profile
from graphs.contract.spec import GRAPHS, BuildSpec, GraphName
from graphs.engines.activation_budget import excesses
from graphs.engines.compile import compile_build
from graphs.engines.processes import BuildProgress
from graphs.engines.table import engine_table
from graphs.engines.targets import TARGETS


def compile(
    build: Annotated[
        Path, typer.Argument(help="A build folder with spec.json: build/MODEL/PRECISION.")
    ],
    target: Annotated[
        str,
        typer.Option(
            help="Compute capability of the GPU, as sm89 or sm120. auto is this machine's GPU, and "
            f"sm120 where there is none. rtx knows {', '.join(f'sm{sm}' for sm in TARGETS['rtx'])}."
        ),
    ] = "auto",
    compiler: Annotated[
        Compiler,
        typer.Option(
            help="rtx: TensorRT-RTX, builds without a GPU. tensorrt: TensorRT, for the data-centre "
            "GPU of this machine."
        ),
    ] = "rtx",
    batch: Annotated[int, typer.Option(help="Sequences of a decode step, at most.")] = 8,
    tokens: Annotated[int, typer.Option(help="Tokens of a prefill step, at most.")] = 128,
    context: Annotated[int, typer.Option(help="Cached rows of a sequence, at most.")] = 4096,
    graph: Annotated[
        list[str] | None,
        typer.Option(
            help=f"Build this graph's engine only ({', '.join(GRAPHS)}); may be repeated. Engines "
            "of the others stay in the manifest where they still match. Default: all."
        ),
    ] = None,
) -> None:
    """Build engines from a build's graphs, in BUILD/COMPILER-SM-PROFILE/, with manifest.json."""
    console = wide_console()
    with _Display(console) as display:
        manifest = compile_build(
            build,
            target,
            Profile(batch, tokens, context),
            compiler,
            graph or GRAPHS,
            display.report,
        )
    console.print(_engine_table(manifest))
    console.print(f"{build / manifest.folder}", soft_wrap=True)
    spec = BuildSpec.load(build)
    for name, engine in manifest.engines.items():
        for excess in excesses(spec, name, engine, manifest.profile):
            console.print(f"warning: {excess}", soft_wrap=True)
        if engine.not_read:
            console.print(f"warning: {name}: {engine.not_read}", soft_wrap=True)
    if missing := [name for name in GRAPHS if name not in manifest.engines]:
        console.print(f"not built, or stale: {', '.join(missing)}")


def table(
    manifests: Annotated[
        list[Path], typer.Argument(help="Manifests: build/MODEL/PRECISION/FOLDER/manifest.json.")
    ],
) -> None:
    """Print compiled engines as a Markdown table: sizes, scratch, launches and FP8 products."""
    print(engine_table(manifests))


class _Display:
    """Progress bars on a terminal, else one line an engine."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.tasks: dict[GraphName, TaskID] = {}
        self.progress = Progress(
            TextColumn("{task.fields[graph]:8}"),
            BarColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.description}"),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )

    def __enter__(self) -> "_Display":
        self.progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.progress.stop()

    def report(self, graph: GraphName, event: BuildProgress | EngineRecord) -> None:
        if graph not in self.tasks:
            self.tasks[graph] = self.progress.add_task("", total=1.0, graph=graph)
        share, text = (
            (event.share, event.phase) if isinstance(event, BuildProgress) else (1.0, "done")
        )
        self.progress.update(self.tasks[graph], completed=share, description=text)
        if isinstance(event, EngineRecord) and not self.console.is_terminal:
            activation = ", ".join(f"{_mb(event.activation_bytes[m])} {m}" for m in ENGINE_MODES)
            self.console.print(
                f"{graph}: {event.seconds:.1f} s, engine {_mb(event.bytes)}, "
                f"activation {activation}, launches {event.launches('decode')} decode, "
                f"{event.launches('prefill')} prefill, FP8 products {event.fp8_products}",
                soft_wrap=True,
            )


def _engine_table(manifest: Manifest) -> Table:
    p = manifest.profile
    table = Table(
        title=f"{manifest.compiler} {manifest.target}: decode {p.batch} × 1 token, prefill "
        f"1 × {p.tokens} tokens, on up to {p.context} cached rows"
    )
    table.add_column("graph")
    columns = ("seconds", "peak memory", "engine", *(f"activation, {m}" for m in ENGINE_MODES))
    for column in (*columns, *(f"launches, {m}" for m in ENGINE_MODES), "FP8 products"):
        table.add_column(column, justify="right")
    for graph, engine in manifest.engines.items():
        sizes = (
            engine.peak_resident_bytes,
            engine.bytes,
            *(engine.activation_bytes[m] for m in ENGINE_MODES),
        )
        launches = (engine.launches(mode) for mode in ENGINE_MODES)
        row = (f"{engine.seconds:.1f}", *map(_mb, sizes), *launches, engine.fp8_products)
        table.add_row(graph, *row)
    return table


def _mb(size: int | None) -> str:
    return "–" if size is None else f"{size / 1e6:.1f} MB"
