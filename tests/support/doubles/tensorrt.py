"""A double of TensorRT's runtime API that checks what the real one would, and runs ONNX Runtime.

`TensorRTDouble` stands for the module, `tensorrt_rtx` or `tensorrt`. An engine file of it holds the
ONNX graph and the profiles. A context executes the graph, in the form that runs on a CPU, at the
very addresses that were bound, when the stream is waited for (tests/support/doubles/cuda.py).

As the real API it refuses by returning None or False and telling the logger why. It refuses:

1. an engine file that is damaged, or of another flavour, version or GPU
2. a tensor that the engine has not
3. a shape of another rank, of other fixed dimensions, or outside the profile
4. an address that is null or off 256 bytes
5. a profile out of range, or set on another stream than the one there is
6. scratch memory that is unset, too small, off 256 bytes, or not the GPU's
7. a run without a profile, with an input whose shape or a tensor whose address is unset
8. shapes that do not go together
9. memory that is not allocated, or no longer
10. an output that overlaps an input, another output, or the scratch memory

The scratch memory is overwritten by every run, and what an engine file says of dtypes, directions
and locations is the graph's.
"""

import enum
import functools
import hashlib
import json
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import onnx
import pytest

import runtime.backends.tensorrt
from graphs.contract.manifest import ENGINE_MODES, Compiler, EngineRecord, Manifest, Profile
from graphs.contract.shapes import input_bounds
from graphs.contract.spec import GRAPHS, BuildSpec
from graphs.engines.tensorrt import MODULES
from graphs.session import open_session
from runtime.backends.tensorrt import TensorRTBackend
from runtime.devices.cuda import CudaDevice
from tests.support.doubles.context import ContextDouble, Fault, Tensor
from tests.support.doubles.cuda import DriverDouble

MAGIC = b"double of an engine\n"
VERSION = "1.7.1.116"


class Severity(enum.Enum):
    INTERNAL_ERROR, ERROR, WARNING, INFO, VERBOSE = range(5)


class ILogger:
    Severity = Severity

    def log(self, severity: enum.Enum, msg: str) -> None:
        raise NotImplementedError


class ExecutionContextAllocationStrategy(enum.Enum):
    STATIC, ON_PROFILE_CHANGE, USER_MANAGED = range(3)


class CudaGraphStrategy(enum.Enum):
    DISABLED, WHOLE_GRAPH_CAPTURE = range(2)


class DynamicShapesKernelSpecializationStrategy(enum.Enum):
    LAZY, EAGER, NONE = range(3)


class TensorIOMode(enum.Enum):
    NONE, INPUT, OUTPUT = range(3)


class TensorLocation(enum.Enum):
    DEVICE, HOST = range(2)


class DataType(enum.Enum):
    """By ONNX's number of the type."""

    FLOAT = onnx.TensorProto.FLOAT
    BF16 = onnx.TensorProto.BFLOAT16
    FP8 = onnx.TensorProto.FLOAT8E4M3FN
    INT64 = onnx.TensorProto.INT64


class TensorRTDouble:
    """See the module's docstring. `calls` counts the contexts' methods, `runs` those of a graph."""

    config: "RuntimeConfigDouble"  # the last that was made

    ILogger = ILogger
    ExecutionContextAllocationStrategy = ExecutionContextAllocationStrategy
    CudaGraphStrategy = CudaGraphStrategy
    DynamicShapesKernelSpecializationStrategy = DynamicShapesKernelSpecializationStrategy
    TensorIOMode = TensorIOMode
    TensorLocation = TensorLocation
    DataType = DataType

    def __init__(self, driver: DriverDouble | None = None, compiler: Compiler = "rtx") -> None:
        self.driver = driver or DriverDouble()
        self.device = CudaDevice(self.driver)
        self.compiler, self.__name__, self.__version__ = compiler, MODULES[compiler], VERSION
        self.Runtime = functools.partial(RuntimeDouble, self)
        self.calls: Counter[str] = Counter()
        self.runs: Counter[str] = Counter()
        self.contexts: list[ContextDouble] = []
        self.compiled: list[str] = []  # what contexts found in no runtime cache
        self.faults: list[Fault] = []

    def plant(
        self, graph: str, run: int, deed: str, row: int | None = None, size: int | None = None
    ) -> None:
        """See Fault."""
        self.faults.append(Fault(graph, run, deed, row, size))

    def fault(self, graph: str, size: int) -> Fault | None:
        """Of the run that is being enqueued."""
        self.runs[graph] += 1
        due = [fault for fault in self.faults if fault.due(graph, size)]
        self.faults = [fault for fault in self.faults if fault not in due]
        return due[0] if due else None

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Have it found by whoever opens a GPU or asks for TensorRT."""
        monkeypatch.setattr(CudaDevice, "open", lambda: self.device)
        monkeypatch.setattr(runtime.backends.tensorrt, "load_tensorrt", lambda compiler: self)


class RuntimeDouble:
    def __init__(self, double: TensorRTDouble, logger: ILogger) -> None:
        self.double, self.logger = double, logger

    def _error(self, message: str) -> None:
        self.logger.log(Severity.ERROR, f"{message}\n")

    def deserialize_cuda_engine(self, serialized_engine: bytes) -> "EngineDouble | None":
        if not serialized_engine.startswith(MAGIC):
            self._error("Serialization assertion header.magicTag == kEXPECTED_MAGIC_TAG failed.")
            return None
        text, _, graph = serialized_engine[len(MAGIC) :].partition(b"\n")
        header = json.loads(text)
        double = self.double
        major, minor = double.driver.capability
        here = {"compiler": double.compiler, "version": VERSION, "sm": 10 * major + minor}
        for key, value in here.items():
            if header[key] != value:
                self._error(f"engine plan of {key} {header[key]}, {value} expected")
                return None
        return EngineDouble(self, header, graph)


class EngineDouble:
    def __init__(self, runtime: RuntimeDouble, header: dict[str, Any], content: bytes) -> None:
        self.runtime, self.double = runtime, runtime.double
        self.graph, self.profiles = header["graph"], header["profiles"]
        self.session = functools.partial(_session, header["precision"], content)
        graph = onnx.load_from_string(content).graph
        self.tensors = {
            value.name: Tensor(output, value.type.tensor_type.elem_type, _dims(value))
            for output, values in ((False, graph.input), (True, graph.output))
            for value in values
        }
        self.num_io_tensors = len(self.tensors)
        self.num_optimization_profiles = len(self.profiles)

    @property
    def device_memory_size_v2(self) -> int:
        return max(map(self.get_device_memory_size_for_profile_v2, range(len(self.profiles))))

    def get_device_memory_size_for_profile_v2(self, profile_index: int) -> int:
        return 4096 * (profile_index + 1)

    def get_tensor_name(self, index: int) -> str:
        return str(list(self.tensors)[index])

    def get_tensor_mode(self, name: str) -> TensorIOMode:
        return TensorIOMode.OUTPUT if self.tensors[name].output else TensorIOMode.INPUT

    def get_tensor_dtype(self, name: str) -> DataType:
        return DataType(self.tensors[name].onnx_type)

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        return tuple(d if isinstance(d, int) else -1 for d in self.tensors[name].dims)

    def get_tensor_location(self, name: str) -> TensorLocation:
        return TensorLocation.DEVICE

    def get_tensor_profile_shape(self, name: str, profile_index: int) -> list[list[int]]:
        fixed = list(self.get_tensor_shape(name))
        bounds: list[list[int]] = self.profiles[profile_index].get(name, [fixed] * 3)
        return bounds

    def create_runtime_config(self) -> "RuntimeConfigDouble":
        assert self.double.compiler == "rtx", "tensorrt has no strategies to configure"
        return RuntimeConfigDouble(self.double)

    def create_execution_context(
        self, runtime_config: "RuntimeConfigDouble | ExecutionContextAllocationStrategy"
    ) -> "ContextDouble":
        """The real one takes either, too."""
        strategy, cache = runtime_config, None
        if isinstance(runtime_config, RuntimeConfigDouble):
            strategy, cache = runtime_config.strategy, runtime_config.cache
        assert strategy is ExecutionContextAllocationStrategy.USER_MANAGED, strategy
        if cache is None or self.graph not in cache.kernels:
            self.double.compiled.append(self.graph)
        if cache is not None:
            cache.kernels.add(self.graph)
        self.double.contexts.append(ContextDouble(self))
        return self.double.contexts[-1]


class RuntimeConfigDouble:
    def __init__(self, double: TensorRTDouble) -> None:
        self.double = double
        self.strategy = ExecutionContextAllocationStrategy.STATIC
        self.cuda_graph_strategy = CudaGraphStrategy.DISABLED
        self.dynamic_shapes_kernel_specialization_strategy = (
            DynamicShapesKernelSpecializationStrategy.LAZY
        )
        self.cache: RuntimeCacheDouble | None = None
        double.config = self  # the last, for the tests

    def set_execution_context_allocation_strategy(
        self, strategy: ExecutionContextAllocationStrategy
    ) -> None:
        self.strategy = strategy

    def create_runtime_cache(self) -> "RuntimeCacheDouble":
        return RuntimeCacheDouble(self.double)

    def set_runtime_cache(self, cache: "RuntimeCacheDouble") -> bool:
        self.cache = cache
        return True


class RuntimeCacheDouble:
    """`kernels` names the graphs whose kernels it holds."""

    def __init__(self, double: TensorRTDouble) -> None:
        self.made_by = [double.driver.name, VERSION]
        self.kernels: set[str] = set()

    def serialize(self) -> memoryview:
        content = {"made_by": self.made_by, "kernels": sorted(self.kernels)}
        return memoryview(json.dumps(content).encode())

    def deserialize(self, blob: bytes) -> bool:
        try:
            content = json.loads(blob)
        except ValueError:
            return False
        if content["made_by"] != self.made_by:
            return False
        self.kernels = set(content["kernels"])
        return True


def _dims(value: onnx.ValueInfoProto) -> tuple[int | str, ...]:
    return tuple(d.dim_param or d.dim_value for d in value.type.tensor_type.shape.dim)


@functools.cache
def _session(precision: str, content: bytes) -> Any:
    return open_session(cast(BuildSpec, SimpleNamespace(precision=precision)), content, threads=1)


def write_double_engines(
    build: Path,
    spec: BuildSpec,
    profile: Profile,
    compiler: Compiler = "rtx",
    into: Path | None = None,
    sm: int = 120,
    version: str = VERSION,
) -> Path:
    """The folder of a build's engines for the double: in the build, or where it is told."""
    records, contents = {}, {}
    for graph in GRAPHS:
        shapes = {mode: input_bounds(spec.graphs[graph], mode, profile) for mode in ENGINE_MODES}
        header = {
            "graph": graph,
            "precision": spec.precision,
            "compiler": compiler,
            "version": version,
            "sm": sm,
            "profiles": [shapes[mode] for mode in ENGINE_MODES],
        }
        onnx_bytes = spec.onnx_bytes(build, graph)
        content = MAGIC + json.dumps(header).encode() + b"\n" + onnx_bytes
        contents[graph] = content
        records[graph] = EngineRecord(
            file=f"{graph}.engine",
            sha256=hashlib.sha256(content).hexdigest(),
            bytes=len(content),
            onnx_sha256=spec.graphs[graph].sha256,
            versions={MODULES[compiler]: version},
            shapes=shapes,
            activation_bytes=dict.fromkeys(ENGINE_MODES, 0),
            budget_bytes=dict.fromkeys(ENGINE_MODES, 0),
            weight_bytes=0,
            programs={},
            not_read="not read: a double's engine",
            seconds=0.0,
            peak_resident_bytes=0,
        )
    manifest = Manifest(compiler, f"sm{sm}", profile, records)
    folder = (into or build) / manifest.folder
    folder.mkdir(parents=True, exist_ok=True)
    for graph, content in contents.items():
        (folder / f"{graph}.engine").write_bytes(content)
    manifest.save(folder)
    return folder


def open_double(
    build: Path,
    spec: BuildSpec,
    profile: Profile,
    into: Path,
    compiler: Compiler = "rtx",
    driver: DriverDouble | None = None,
    **options: Any,
) -> tuple[TensorRTBackend, TensorRTDouble]:
    """A backend on a double of its own, its weights not yet loaded.

    Its engines are written into a folder in `into`; `options` are those of TensorRTBackend.open.
    """
    double = TensorRTDouble(driver, compiler)
    folder = write_double_engines(build, spec, profile, compiler, into)
    backend = TensorRTBackend.open(build, spec, folder, double.device, trt=double, **options)
    return backend, double
