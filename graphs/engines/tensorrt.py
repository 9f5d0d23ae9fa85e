"""The one module that imports TensorRT: which flavour, and how one engine is built.

Two flavours share one Python API. `rtx` is TensorRT-RTX: it builds for a chosen GPU on a machine
that has none. `tensorrt` is TensorRT for data-centre GPUs: it builds for the GPU of the machine.
Polygraphy drives both and decides by an environment variable, once, when it is first imported; it
also owns the builder's logger. So `build_engine` changes the process it runs in, and wants one of
its own (graphs.engines.compile gives it one). Importing this module imports none of these packages.
How engines are run is for runtime/backends/engine.py, which is given what `load_tensorrt` returns.
"""

import importlib
import importlib.metadata
import logging
import os
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from graphs.contract.manifest import Bounds, Compiler

OnProgress = Callable[[float, str], None]  # share of the build done, name of the running phase

MODULES: dict[Compiler, str] = {"rtx": "tensorrt_rtx", "tensorrt": "tensorrt"}
INSTALL: dict[Compiler, str] = {
    "rtx": "pip install '.[compile]'",
    "tensorrt": "pip install '.[tensorrt]', or use the compiler rtx",
}


class TensorRTError(RuntimeError):
    """A package that is missing, or a graph that the builder refuses."""


@dataclass(frozen=True)
class BuiltEngine:
    """A serialised engine and what the builder said of it, profiles in the order given.

    `activation_bytes` is the builder's `Total Activation Memory`: a weight that is copied at every
    run shows there. None where the log has not one such line a profile.
    """

    data: bytes
    activation_bytes: tuple[int | None, ...]
    weight_bytes: int | None


def load_tensorrt(compiler: Compiler) -> Any:
    """The flavour's Python module. Raises TensorRTError that says what to install."""
    return _import(MODULES[compiler], compiler)


def versions(compiler: Compiler) -> dict[str, str]:
    """The versions of the packages that decide an engine's content."""
    others = {name: importlib.metadata.version(name) for name in ("onnx", "polygraphy")}
    return {MODULES[compiler]: str(load_tensorrt(compiler).__version__), **others}


def build_engine(
    onnx_bytes: bytes,
    profiles: Sequence[Mapping[str, Bounds]],
    compiler: Compiler,
    capability: tuple[int, int],
    report: OnProgress,
) -> BuiltEngine:
    """Build a model of standard operators, strongly typed. Raises TensorRTError.

    A profile bounds the inputs whose shape is dynamic; `rtx` builds for `capability`, `tensorrt`
    for the GPU of this machine. Changes this process: see the module's docstring.
    """
    trt, log = load_tensorrt(compiler), _Log()
    backend = _load_polygraphy(compiler, log)
    try:
        network = backend.NetworkFromOnnxBytes(onnx_bytes, strongly_typed=True)()
        config = _config(trt, backend, compiler, capability)(
            profiles=[_profile(backend, profile, network[1]) for profile in profiles],
            progress_monitor=_monitor(trt, report),
        )
        data = bytes(backend.EngineBytesFromNetwork(network, config)())
    except Exception as e:  # Polygraphy's own exception type, or pybind's
        reason = "; ".join(log.errors[-3:]) or str(e)
        raise TensorRTError(f"{MODULES[compiler]} {trt.__version__}: {reason}") from e
    activations = log.figures("Total Activation Memory")
    weights = log.figures("Total Weights Memory")
    return BuiltEngine(
        data,
        tuple(activations) if len(activations) == len(profiles) else (None,) * len(profiles),
        weights[0] if len(weights) == 1 else None,
    )


class _Log(logging.Handler):
    """The builder's messages, as Polygraphy passes them on."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []
        self.errors: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        text = " ".join(record.getMessage().split())
        (self.errors if record.levelno >= logging.ERROR else self.lines).append(text)

    def figures(self, title: str) -> list[int]:
        matches = (re.search(rf"{title}: (\d+) bytes", line) for line in self.lines)
        return [int(match[1]) for match in matches if match]


def _import(name: str, compiler: Compiler) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as e:
        raise TensorRTError(f"{name}: not usable ({e}); {INSTALL[compiler]}") from e


def _load_polygraphy(compiler: Compiler, log: _Log) -> Any:
    """Polygraphy's TensorRT backend, of this flavour, its messages sent to `log` alone."""
    os.environ["POLYGRAPHY_USE_TENSORRT_RTX"] = "1" if compiler == "rtx" else "0"
    config = _import("polygraphy.config", compiler)
    if (compiler == "rtx") != config.USE_TENSORRT_RTX:
        raise TensorRTError(
            f"polygraphy: already imported for another flavour than {compiler}; build in a new "
            "process"
        )
    logger = importlib.import_module("polygraphy.logger").G_LOGGER
    logger.use_python_logging_system = True
    logger.letter = logger.colors = False
    logger.module_severity = logger.VERBOSE  # TensorRT's INFO
    target = logging.getLogger("Polygraphy")
    target.handlers, target.propagate = [log], False
    target.setLevel(logger.VERBOSE)
    return importlib.import_module("polygraphy.backend.trt")


def _config(
    trt: Any, backend: Any, compiler: Compiler, capability: tuple[int, int]
) -> Callable[..., Any]:
    """Polygraphy's configuration, without TF32 and for one stream.

    A block's launches are a chain, so a second stream only adds waits.
    """
    flavour_options: dict[str, Any]
    if compiler == "tensorrt":
        create = backend.CreateConfig
        # for its engine inspector
        flavour_options = {"profiling_verbosity": trt.ProfilingVerbosity.DETAILED}
    else:
        create = importlib.import_module("polygraphy.backend.tensorrt_rtx").CreateConfigRTX
        flavour_options = {"compute_capabilities": [capability]}

    def clear_tf32(_builder: Any, _network: Any, config: Any) -> None:
        config.clear_flag(trt.BuilderFlag.TF32)

    return lambda **options: backend.PostprocessConfig(
        create(max_aux_streams=0, **flavour_options, **options), clear_tf32
    )


def _profile(backend: Any, bounds: Mapping[str, Bounds], network: Any) -> Any:
    profile = backend.Profile()
    for name, (least, usual, greatest) in bounds.items():
        profile.add(name, min=least, opt=usual, max=greatest)
    return profile.fill_defaults(network)


def _monitor(trt: Any, report: OnProgress) -> Any:
    """Reports each hundredth of the build, never going back.

    Phases nest: the share done is the outer phase's finished steps plus its running step's share.
    """

    class Monitor(trt.IProgressMonitor):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.running: dict[str, list[int]] = {}  # phase -> [steps done, steps]
            self.reported = 0.0
            self.lock = threading.Lock()  # the builder calls from several threads

        def phase_start(self, phase: str, parent: str | None, steps: int) -> None:
            with self.lock:
                self.running[phase] = [0, max(steps, 1)]

        def step_complete(self, phase: str, step: int) -> bool:
            with self.lock:
                self.running[phase][0] = min(step + 1, self.running[phase][1])
                done, width = 0.0, 1.0
                for count, steps in self.running.values():
                    width /= steps
                    done += count * width
                if done >= self.reported + 0.01:
                    self.reported = done
                    report(min(done, 1.0), phase)
            return True

        def phase_finish(self, phase: str) -> None:
            with self.lock:
                self.running.pop(phase, None)

    return Monitor()
