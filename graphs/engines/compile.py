"""Builds engines of a build folder's graphs: checks the target and the graphs, builds, records.

A graph that breaks a rule of `graphs.engines.lint` is refused before TensorRT sees it.

Each engine is built in a fresh process, two at a time: Polygraphy fixes its flavour at import, a
builder that aborts takes only its own process along, and its peak memory is its own. Nothing is
written until every engine asked for is built, and the manifest is written last: were this ended in
between, an engine would not have the hash that the manifest gives, and be refused.

Nothing is skipped here: Make decides which graphs are stale and names them. Engines of other graphs
stay in the manifest where their ONNX file and their own bytes are still what it says.
"""

import hashlib
import multiprocessing
import signal
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path

import onnx

from graphs.contract.files import replacing
from graphs.contract.manifest import (
    ENGINE_MODES,
    Bounds,
    Compiler,
    EngineMode,
    EngineRecord,
    Manifest,
    Profile,
)
from graphs.contract.shapes import CompileError, check_profile, input_bounds
from graphs.contract.spec import GRAPHS, BuildError, BuildSpec, GraphName, GraphSpec
from graphs.engines.activation_budget import activation_budget
from graphs.engines.lint import lint_model
from graphs.engines.targets import resolve_target
from graphs.engines.tensorrt import BuiltEngine, TensorRTError, build_engine, versions
from graphs.passes.inline import inline

PARALLEL = 2


@dataclass(frozen=True)
class BuildProgress:
    """The progress of a build: the share done, and the running phase's name."""

    share: float
    phase: str


OnBuildEvent = Callable[[GraphName, BuildProgress | EngineRecord], None]


@dataclass(frozen=True)
class _Job:
    onnx_bytes: bytes
    shapes: dict[EngineMode, dict[str, Bounds]]
    compiler: Compiler
    capability: tuple[int, int]


@dataclass(frozen=True)
class _Built:
    engine: BuiltEngine
    versions: dict[str, str]
    seconds: float
    peak_resident_bytes: int


def compile_build(
    build: Path,
    target: str = "auto",
    profile: Profile | None = None,
    compiler: Compiler = "rtx",
    graphs: Collection[str] = GRAPHS,
    report: OnBuildEvent = lambda graph, event: None,
) -> Manifest:
    """Build the engines of `graphs` and return the folder's new manifest.

    Raises BuildError where the build folder is not whole, CompileError where target or profile
    cannot be, a graph breaks a rule, or a build fails.
    """
    profile = profile or Profile()
    spec = BuildSpec.load(build)
    if unknown := sorted(set(graphs) - set(GRAPHS)):
        raise CompileError(f"graph: expected one of {', '.join(GRAPHS)}, got {unknown[0]!r}")
    check_profile(profile)
    sm = resolve_target(target, compiler, spec.precision)
    jobs = {
        graph: _Job(
            spec.onnx_bytes(build, graph),
            {mode: input_bounds(spec.graphs[graph], mode, profile) for mode in ENGINE_MODES},
            compiler,
            divmod(sm, 10),
        )
        for graph in GRAPHS
        if graph in graphs
    }
    _refuse_slow(jobs)
    records: dict[GraphName, EngineRecord] = {}
    engines: dict[GraphName, bytes] = {}

    def progress(graph: GraphName, event: BuildProgress | _Built) -> None:
        if isinstance(event, _Built):
            engines[graph] = event.engine.data
            budget = {m: activation_budget(spec, graph, m, profile) for m in ENGINE_MODES}
            records[graph] = _record(spec.graphs[graph], jobs[graph], event, budget)
        report(graph, event if isinstance(event, BuildProgress) else records[graph])

    _build_all(jobs, progress)
    manifest = Manifest(compiler, f"sm{sm}", profile, records)
    return _write(build / manifest.folder, manifest, engines, spec)


def _refuse_slow(jobs: Mapping[GraphName, _Job]) -> None:
    """Raises CompileError where a graph breaks a rule, BuildError where a file is no graph."""
    findings = [
        f for graph, job in jobs.items() for f in lint_model(graph, job.onnx_bytes, job.shapes)
    ]
    if findings:
        more = f"; and {len(findings) - 1} more" if findings[1:] else ""
        raise CompileError(f"{findings[0]}{more} (`python -m graphs lint` lists all)")


def _build_all(
    jobs: Mapping[GraphName, _Job], progress: Callable[[GraphName, BuildProgress | _Built], None]
) -> None:
    """Run the jobs, PARALLEL at a time; the first failure ends the others."""
    context = multiprocessing.get_context("spawn")
    waiting = list(jobs)
    running: dict[Connection, tuple[GraphName, BaseProcess]] = {}
    try:
        while waiting or running:
            while waiting and len(running) < PARALLEL:
                graph = waiting.pop(0)
                receiver, sender = context.Pipe(duplex=False)
                child = context.Process(target=_build_one, args=(jobs[graph], sender))
                child.start()
                sender.close()
                running[receiver] = graph, child
            for pipe in wait(list(running)):
                assert isinstance(pipe, Connection)
                graph, process = running[pipe]
                event = _receive(pipe, graph, process)
                progress(graph, event)
                if isinstance(event, _Built):
                    process.join()
                    del running[pipe]
    finally:
        for _, process in running.values():
            process.terminate()
            process.join()


def _receive(pipe: Connection, graph: GraphName, process: BaseProcess) -> BuildProgress | _Built:
    try:
        event: BuildProgress | _Built | TensorRTError = pipe.recv()
    except EOFError as e:
        process.join()
        raise CompileError(
            f"{graph}: the builder's process ended with exit code {process.exitcode} and no engine"
        ) from e
    if isinstance(event, TensorRTError):
        raise CompileError(f"{graph}: {event}") from event
    return event


def _build_one(job: _Job, pipe: Connection) -> None:
    """Build in a process of its own; send BuildProgress, then a _Built or the error."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends this process on Ctrl-C
    start = time.perf_counter()
    try:
        model = inline(onnx.load_from_string(job.onnx_bytes))
        engine = build_engine(
            model.SerializeToString(),
            [job.shapes[mode] for mode in ENGINE_MODES],
            job.compiler,
            job.capability,
            lambda share, phase: pipe.send(BuildProgress(share, phase)),
        )
        seconds = round(time.perf_counter() - start, 3)
        pipe.send(_Built(engine, versions(job.compiler), seconds, _peak_resident_bytes()))
    except TensorRTError as e:
        pipe.send(e)


def _peak_resident_bytes() -> int:
    """This program's peak memory: ru_maxrss would start at what the parent had when it forked."""
    status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
    peak = next(line for line in status.splitlines() if line.startswith("VmHWM:"))
    return int(peak.split()[1]) * 1024


def _record(
    graph: GraphSpec, job: _Job, built: _Built, budget: dict[EngineMode, int]
) -> EngineRecord:
    engine = built.engine
    return EngineRecord(
        file=f"{graph.name}.engine",
        sha256=hashlib.sha256(engine.data).hexdigest(),
        bytes=len(engine.data),
        onnx_sha256=graph.sha256,
        versions=built.versions,
        shapes=job.shapes,
        activation_bytes=dict(zip(ENGINE_MODES, engine.activation_bytes, strict=True)),
        budget_bytes=budget,
        weight_bytes=engine.weight_bytes,
        matmul_inputs_as_parsed=engine.matmul_inputs,
        seconds=built.seconds,
        peak_resident_bytes=built.peak_resident_bytes,
    )


def _write(
    folder: Path, manifest: Manifest, engines: Mapping[GraphName, bytes], spec: BuildSpec
) -> Manifest:
    """Replace the engines, keep the manifest's other entries that still hold, write it last."""
    kept = _kept(folder, spec, built=manifest.engines)
    engine_records = {g: record for g in GRAPHS if (record := (kept | manifest.engines).get(g))}
    manifest = replace(manifest, engines=engine_records)
    folder.mkdir(exist_ok=True)
    with ExitStack() as files:  # all are written before the first takes its name
        for graph, data in engines.items():
            files.enter_context(replacing(folder / f"{graph}.engine")).write_bytes(data)
    manifest.save(folder)
    return manifest


def _kept(
    folder: Path, spec: BuildSpec, built: Collection[GraphName]
) -> dict[GraphName, EngineRecord]:
    kept: dict[GraphName, EngineRecord] = {}
    for graph in GRAPHS:
        if graph in built:
            continue
        try:
            old = Manifest.load(folder)
            old.engine_bytes(folder, graph, spec.graphs[graph].sha256)
        except BuildError:
            continue  # stale, so Make names it next time, or never built
        kept[graph] = old.engines[graph]
    return kept
