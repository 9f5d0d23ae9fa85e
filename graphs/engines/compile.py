"""Builds engines of a build folder's graphs: checks the target and the graphs, builds, records.

A graph that breaks a rule of `graphs.engines.lint` is refused before TensorRT sees it; an engine
whose program, as compiled, is not what was to be compiled is refused too (graphs.engines.program).

Nothing is written until every engine asked for is built, and the manifest is written last: were
this ended in between, an engine would not have the hash that the manifest gives, and be refused.

Nothing is skipped here: Make decides which graphs are stale and names them. Engines of other graphs
stay in the manifest where their ONNX file and their own bytes are still what it says.
"""

import hashlib
from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import onnx

from graphs.contract.files import replacing
from graphs.contract.manifest import (
    ENGINE_MODES,
    Compiler,
    EngineMode,
    EngineRecord,
    Manifest,
    Profile,
)
from graphs.contract.program import Program
from graphs.contract.shapes import CompileError, check_profile, input_bounds
from graphs.contract.spec import GRAPHS, BuildError, BuildSpec, GraphName, GraphSpec
from graphs.engines.activation_budget import activation_budget
from graphs.engines.lint import lint_model
from graphs.engines.processes import BuildJob, BuildProgress, FinishedBuild, build_all
from graphs.engines.program import LinearLayers, ProgramTextError, read_programs
from graphs.engines.targets import resolve_target
from graphs.engines.tensorrt import MODULES

OnBuildEvent = Callable[[GraphName, BuildProgress | EngineRecord], None]


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
    cannot be, a graph breaks a rule, a build fails, or an engine's program is at fault.
    """
    profile = profile or Profile()
    spec = BuildSpec.load(build)
    if unknown := sorted(set(graphs) - set(GRAPHS)):
        raise CompileError(f"graph: expected one of {', '.join(GRAPHS)}, got {unknown[0]!r}")
    check_profile(profile)
    sm = resolve_target(target, compiler, spec.precision)
    jobs = {
        graph: BuildJob(
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

    def progress(graph: GraphName, event: BuildProgress | FinishedBuild) -> None:
        if isinstance(event, FinishedBuild):
            engines[graph] = event.engine.data
            budget = {m: activation_budget(spec, graph, m, profile) for m in ENGINE_MODES}
            records[graph] = _record(spec.graphs[graph], jobs[graph], event, budget)
            _refuse_faults(records[graph], graph)
        report(graph, event if isinstance(event, BuildProgress) else records[graph])

    build_all(jobs, progress)
    manifest = Manifest(compiler, f"sm{sm}", profile, records)
    return _write(build / manifest.folder, manifest, engines, spec)


def _refuse_slow(jobs: Mapping[GraphName, BuildJob]) -> None:
    """Raises CompileError where a graph breaks a rule, BuildError where a file is no graph."""
    findings = [
        f for graph, job in jobs.items() for f in lint_model(graph, job.onnx_bytes, job.shapes)
    ]
    if findings:
        more = f"; and {len(findings) - 1} more" if findings[1:] else ""
        raise CompileError(f"{findings[0]}{more} (`python -m graphs lint` lists all)")


def _record(
    graph: GraphSpec, job: BuildJob, built: FinishedBuild, budget: dict[EngineMode, int]
) -> EngineRecord:
    engine = built.engine
    programs, not_read = _programs(job, built)
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
        programs=programs,
        not_read=not_read,
        seconds=built.seconds,
        peak_resident_bytes=built.peak_resident_bytes,
    )


def _programs(job: BuildJob, built: FinishedBuild) -> tuple[dict[EngineMode, Program], str]:
    """What the engine runs in each mode; or nothing, and why it was not read."""
    package = MODULES[job.compiler]
    version = f"{package} {built.versions[package]}"
    if job.compiler == "tensorrt":
        return {}, f"not read: {version}, whose engines are inspected by `make gpu-check`"
    layers = LinearLayers.from_model(onnx.load_from_string(job.onnx_bytes))
    try:
        programs = read_programs(built.engine.data, layers, len(ENGINE_MODES))
    except ProgramTextError as e:
        return {}, f"not read: {version}: {e}"
    return dict(zip(ENGINE_MODES, programs, strict=True)), ""


def _refuse_faults(record: EngineRecord, graph: GraphName) -> None:
    """Raises CompileError where the compiled program is not what was to be compiled."""
    for mode, program in record.programs.items():
        if faults := program.faults():
            raise CompileError(f"{graph}: {mode}, as compiled: {'; '.join(faults)}")


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
