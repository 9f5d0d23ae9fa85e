"""Builds engines, each in a process of its own, two at a time.

Polygraphy fixes its flavour at import, a builder that aborts takes only its own process along, and
its peak memory is its own.
"""

import multiprocessing
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path

import onnx

from graphs.contract.manifest import ENGINE_MODES, Bounds, Compiler, EngineMode
from graphs.contract.shapes import CompileError
from graphs.contract.spec import GraphName
from graphs.engines.tensorrt import BuiltEngine, TensorRTError, build_engine, versions
from graphs.passes.inline import inline

PARALLEL = 2


@dataclass(frozen=True)
class BuildProgress:
    """The progress of a build: the share done, and the running phase's name."""

    share: float
    phase: str


@dataclass(frozen=True)
class BuildJob:
    """A graph to build for a GPU of this compute capability, and the shapes of its modes."""

    onnx_bytes: bytes
    shapes: dict[EngineMode, dict[str, Bounds]]
    compiler: Compiler
    capability: tuple[int, int]


@dataclass(frozen=True)
class FinishedBuild:
    """An engine, and what building it took: versions, seconds, peak memory of its process."""

    engine: BuiltEngine
    versions: dict[str, str]
    seconds: float
    peak_resident_bytes: int


def build_all(
    jobs: Mapping[GraphName, BuildJob],
    progress: Callable[[GraphName, BuildProgress | FinishedBuild], None],
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
                if isinstance(event, FinishedBuild):
                    process.join()
                    del running[pipe]
    finally:
        for _, process in running.values():
            process.terminate()
            process.join()


def _receive(
    pipe: Connection, graph: GraphName, process: BaseProcess
) -> BuildProgress | FinishedBuild:
    try:
        event: BuildProgress | FinishedBuild | TensorRTError = pipe.recv()
    except EOFError as e:
        process.join()
        raise CompileError(
            f"{graph}: the builder's process ended with exit code {process.exitcode} and no engine"
        ) from e
    if isinstance(event, TensorRTError):
        raise CompileError(f"{graph}: {event}") from event
    return event


def _build_one(job: BuildJob, pipe: Connection) -> None:
    """Build in a process of its own; send BuildProgress, then a FinishedBuild or the error."""
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
        pipe.send(FinishedBuild(engine, versions(job.compiler), seconds, _peak_resident_bytes()))
    except TensorRTError as e:
        pipe.send(e)


def _peak_resident_bytes() -> int:
    """This program's peak memory: ru_maxrss would start at what the parent had when it forked."""
    status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
    peak = next(line for line in status.splitlines() if line.startswith("VmHWM:"))
    return int(peak.split()[1]) * 1024
