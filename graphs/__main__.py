"""`python -m graphs describe|budget|parity|report|standalone|verify|lint|compile|table`."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from graphs.budget.accounting import Account, Figures
from graphs.budget.gpus import GPUS, UnknownGpuError, find_gpu
from graphs.budget.show import Show, show_built, show_checkpoints, show_models
from graphs.cli import make_app, progress_bar, run, wide_console
from graphs.contract.config import PRESETS, load_config
from graphs.contract.manifest import ENGINE_MODES, Compiler, EngineRecord, Manifest, Profile
from graphs.contract.shapes import CompileError, check_profile
from graphs.contract.spec import GRAPHS, BuildSpec, GraphName, Precision
from graphs.contract.tensorfile import TensorFile
from graphs.engines.activation_budget import excesses
from graphs.engines.compile import BuildProgress, compile_build
from graphs.engines.lint import RULES, lint_build
from graphs.engines.table import engine_table
from graphs.engines.targets import TARGETS
from graphs.engines.tensorrt import TensorRTError
from graphs.parity.graphs import graph_parity
from graphs.parity.ranges import golden_findings
from graphs.parity.replay import graph_cases
from graphs.report.merge import merge
from graphs.report.page import save_page
from graphs.report.terminal import failures, show, summary

app = make_app("The contract between export and runtime: models, graphs and engines.")


@app.command()
def describe(
    source: Annotated[
        str,
        typer.Argument(help="A preset (k2), a config.json, or a checkpoint's folder."),
    ],
    as_json: Annotated[
        bool, typer.Option("--json", help="Every figure, for programs to read.")
    ] = False,
) -> None:
    """Parameters and bytes of each part of a block and of the model, and what the cache holds."""
    account = Account.of(load_config(source))
    if as_json:
        print(json.dumps(account.as_dict(), indent=1, ensure_ascii=False))
        return
    console = wide_console()
    console.print(_parameter_table(account))
    values = account.cache_values
    console.print(f"active per token, with lm_head: {account.active_parameters_per_token:,}")
    for kind in account.blocks:
        console.print(f"active per token, {kind} block: {account.active_parameters(kind):,}")
    console.print(
        f"cache, values a position and layer: {values['latent']:,} as latent, "
        f"{values['per_head']:,} as per-head keys and values"
    )


@app.command()
def budget(
    sources: Annotated[
        list[str] | None,
        typer.Argument(
            help="Presets (k2), config.json files, or checkpoints' folders; with --engines, "
            "build/MODEL/PRECISION/FOLDER/manifest.json. Where none is named: the memory and the "
            "cards that each preset takes."
        ),
    ] = None,
    precision: Annotated[Precision, typer.Option(help="Of the packed weights.")] = "fp8",
    gpu: Annotated[
        list[str] | None,
        typer.Option(help=f"A GPU of the table; may be repeated. All: {', '.join(GPUS)}."),
    ] = None,
    batch: Annotated[int, typer.Option(help="Sequences of a decode step.")] = 8,
    tokens: Annotated[int, typer.Option(help="Tokens of a prefill step.")] = 128,
    context: Annotated[int, typer.Option(help="Cached rows of each sequence.")] = 4096,
    as_checkpoint: Annotated[
        bool,
        typer.Option(
            "--as-checkpoint",
            help="The roofline of decode steps on the bytes of checkpoints, in bf16, block FP8 and "
            "INT4, instead of the packed layout; by default of k2.",
        ),
    ] = False,
    engines: Annotated[
        bool,
        typer.Option(
            "--engines",
            help="What the builder said of built engines beside their budgets; exit status 1 where "
            "one takes over 10 % more.",
        ),
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Every figure, for programs to read.")
    ] = False,
) -> None:
    """Bytes, operations, time and memory of steps, computed from configs and GPUs' public figures.

    Nothing here is measured but what --engines shows, which is the builder's.
    """
    profile = Profile(batch, tokens, context)
    check_profile(profile)
    gpus = [find_gpu(name) for name in gpu or GPUS]
    to = Show(wide_console(), as_json)
    if engines:
        if not show_built(to, [Path(source) for source in sources or ()]):
            raise typer.Exit(1)
    elif as_checkpoint:
        show_checkpoints(to, sources or ["k2"], gpus, context)
    else:
        presets = sorted(path.stem for path in PRESETS.glob("*.json"))
        show_models(to, sources or presets, precision, profile, gpus, steps=bool(sources))


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


@app.command()
def verify(
    build: Annotated[Path, typer.Argument(help="A build folder: build/MODEL/PRECISION.")],
) -> None:
    """Recompute the checksums of all packed tensors; the first that differs is named."""
    files = sorted(build / name for name in BuildSpec.load(build).weight_files)
    with progress_bar() as progress:
        for path in progress.track(files, description="verifying"):
            TensorFile.open(path).verify()
    print(f"{build}: {len(files)} files are as they were written")


@app.command()
def lint(
    build: Annotated[
        Path, typer.Argument(help="A build folder with spec.json: build/MODEL/PRECISION.")
    ],
) -> None:
    """Hold every graph against the rules that keep engines fast; exit status 1 where one is broken.

    Warns of what 16 bits or an FP8 scale would lose of the values in the goldens, if there are any.
    """
    findings = lint_build(build)
    goldens = graph_cases(build, BuildSpec.load(build)) if (build / "golden").exists() else []
    warnings = [warning for golden in goldens for warning in golden_findings(golden)]
    for line in (*(f"warning: {w}" for w in warnings), *(f"error: {f}" for f in findings)):
        print(line)
    ranges = f"{len(warnings)} range warnings in {len(goldens)} goldens"
    if not goldens:
        ranges = "no goldens, so no ranges; make them with `python -m export golden`"
    print(f"{build}: {len(RULES)} rules, {len(GRAPHS)} graphs, {len(findings)} errors; {ranges}")
    if findings:
        raise typer.Exit(1)


@app.command("compile")
def compile_command(
    build: Annotated[
        Path, typer.Argument(help="A build folder with spec.json: build/MODEL/PRECISION.")
    ],
    target: Annotated[
        str,
        typer.Option(
            help="The GPU's compute capability, as sm89 or sm120. auto is this machine's GPU, and "
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
            "of the others stay in the manifest where they still match. All, where none is named."
        ),
    ] = None,
) -> None:
    """Engines from a build folder's graphs, in BUILD/COMPILER-SM-PROFILE/, with manifest.json."""
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
    if missing := [name for name in GRAPHS if name not in manifest.engines]:
        console.print(f"not built, or no longer of their ONNX file: {', '.join(missing)}")


@app.command()
def table(
    manifests: Annotated[
        list[Path], typer.Argument(help="build/MODEL/PRECISION/FOLDER/manifest.json, any number.")
    ],
) -> None:
    """Compiled engines as a Markdown table: sizes and activation memory of each."""
    print(engine_table(manifests))


class _Display:
    """Bars on a terminal, else one line an engine."""

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
                f"activation {activation}"
            )


def _engine_table(manifest: Manifest) -> Table:
    p = manifest.profile
    table = Table(
        title=f"{manifest.compiler} {manifest.target}: decode {p.batch} × 1 token, prefill "
        f"1 × {p.tokens} tokens, on up to {p.context} cached rows"
    )
    table.add_column("graph")
    for column in ("seconds", "peak memory", "engine", *(f"activation, {m}" for m in ENGINE_MODES)):
        table.add_column(column, justify="right")
    for graph, engine in manifest.engines.items():
        sizes = (
            engine.peak_resident_bytes,
            engine.bytes,
            *(engine.activation_bytes[m] for m in ENGINE_MODES),
        )
        table.add_row(graph, f"{engine.seconds:.1f}", *map(_mb, sizes))
    return table


def _parameter_table(account: Account) -> Table:
    table = Table(title=f"{account.config.num_hidden_layers} layers")
    table.add_column("")
    columns: dict[str, Callable[[Figures], int | None]] = {
        "parameters": lambda f: f.parameters,
        "bf16 checkpoint, B": lambda f: f.bf16_checkpoint_bytes,
        "FP8 checkpoint, B": lambda f: f.fp8_checkpoint_bytes,
        "INT4 checkpoint, B": lambda f: f.int4_checkpoint_bytes,
        "fp8 packed, B": lambda f: f.packed_bytes["fp8"],
    }
    columns = {name: of for name, of in columns.items() if of(account.model) is not None}
    for column in columns:
        table.add_column(column, justify="right")

    def row(name: str, figures: Figures, style: str | None = None, section: bool = False) -> None:
        cells = (f"{of(figures):,}" for of in columns.values())
        table.add_row(name, *cells, style=style, end_section=section)

    for kind, components in account.blocks.items():
        attention = [c for c in components if c.attention]
        for component in attention:
            row(f"    {component.name}", account.figures([component]))
        row("  attention", account.figures(attention))
        for component in components[len(attention) :]:
            row(f"  {component.name}", account.figures([component]))
        count = account.config.count(kind)
        row(f"{kind} block", account.figures(components), "bold")
        row(f"{kind} blocks, {count} in all", account.figures(components * count))
        row(
            "  of it output projection",
            account.figures(attention[-1:] * count),
            section=True,
        )
    for component in account.ends:
        row(component.name, account.figures([component]))
    row("model", account.model, "bold")
    return table


def _mb(size: int | None) -> str:
    return "–" if size is None else f"{size / 1e6:.1f} MB"


if __name__ == "__main__":
    run(app, CompileError, TensorRTError, UnknownGpuError)
