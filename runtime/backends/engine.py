"""TensorRT's engines and execution contexts, with an error for each refusal.

TensorRT says no by returning None or False, and why to a logger; here that is a BackendError with
what the logger heard.

A context holds addresses and shapes until they are set anew. So one context per layer lets the
weights be bound once. The scratch memory is ours, one buffer for all contexts: they run one after
the other, on one stream. TensorRT's module, of either flavour, is passed in.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from graphs.contract.manifest import ENGINE_MODES, EngineMode, EngineRecord
from graphs.contract.spec import GraphName
from runtime.backends import BackendError

MESSAGES = 4  # the most of the logger's messages in an error


@dataclass(frozen=True)
class RtxOptions:
    """How TensorRT-RTX makes and starts kernels at run time; `tensorrt` has no such choice.

    specialization: kernels for the very shapes of a step, made at a shape's first use (`eager`), or
    beside the running step, which another kernel serves until then (`lazy`, TensorRT's default).
    `none` is ours: a lone sequence's context has another length at every token, so each step would
    compile for all blocks what it never uses again; and with `lazy`, what a step computes depends
    on when it is run, where a request is to give the same tokens whatever ran before.

    cuda_graphs: `whole_graph_capture` records a run and replays it, which saves the launches where
    shapes and addresses are those of a recorded run. In a chain they seldom are: lengths grow, the
    residual stream alternates between two buffers, experts change. So it is `disabled`.

    Neither choice was measured: that needs a GPU.
    """

    specialization: Literal["none", "lazy", "eager"] = "none"
    cuda_graphs: Literal["disabled", "whole_graph_capture"] = "disabled"


class Library:
    """A flavour's module, its runtime and its log."""

    def __init__(self, trt: Any) -> None:
        """Raises BackendError."""
        self.trt = trt
        self.version = str(trt.__version__)
        self.log = _message_log(trt)
        try:
            self.runtime = trt.Runtime(self.log)
        except TypeError as e:  # how pybind says that there is none
            raise self.refused(f"{trt.__name__} {self.version}: no runtime") from e

    def open(self, graph: GraphName, content: bytes, record: EngineRecord) -> "LoadedEngine":
        """Raises BackendError where the engine cannot be loaded."""
        engine = self.runtime.deserialize_cuda_engine(content)
        if engine is None:
            raise self.refused(f"engine {graph} ({record.file}): not loaded")
        return LoadedEngine(self, graph, engine, record)

    def refused(self, what: str) -> BackendError:
        messages = list(self.log.errors)[-MESSAGES:]
        self.log.errors.clear()
        return BackendError(f"{what}: {'; '.join(messages) or 'TensorRT gave no reason'}")


class LoadedEngine:
    """One graph's engine, which all of its layers share."""

    def __init__(self, library: Library, graph: GraphName, engine: Any, record: EngineRecord):
        self.library, self.graph, self.engine, self.record = library, graph, engine, record
        self._config: Any = None

    @property
    def scratch_bytes(self) -> int:
        """Bytes that a run needs, in whichever mode."""
        engine = self.engine
        sizes = (engine.get_device_memory_size_for_profile_v2(i) for i in range(len(ENGINE_MODES)))
        return max(int(engine.device_memory_size_v2), *map(int, sizes))

    def configure(self, options: RtxOptions) -> Any:
        """Set TensorRT-RTX's options for all contexts; returns an empty IRuntimeCache to share.

        Raises BackendError.
        """
        trt, config = self.library.trt, self.engine.create_runtime_config()
        if config is None:
            raise self.library.refused(f"engine {self.graph}: create_runtime_config")
        config.set_execution_context_allocation_strategy(
            trt.ExecutionContextAllocationStrategy.USER_MANAGED
        )
        config.cuda_graph_strategy = getattr(trt.CudaGraphStrategy, options.cuda_graphs.upper())
        config.dynamic_shapes_kernel_specialization_strategy = getattr(
            trt.DynamicShapesKernelSpecializationStrategy, options.specialization.upper()
        )
        self._config = config
        return config.create_runtime_cache()

    def share(self, cache: Any) -> None:
        """Have all contexts made from now on use this IRuntimeCache. Raises BackendError."""
        if not self._config.set_runtime_cache(cache):
            raise self.library.refused(f"engine {self.graph}: set_runtime_cache")

    def context(self, mode: EngineMode, scratch: tuple[int, int], stream: int) -> "Context":
        """A new context; scratch is address and size. Raises BackendError."""
        how = self._config or self.library.trt.ExecutionContextAllocationStrategy.USER_MANAGED
        context = self.engine.create_execution_context(how)
        if context is None:
            raise self.library.refused(f"engine {self.graph}: create_execution_context")
        return Context(self, context, mode, scratch, stream)


class Context:
    """An execution context of one mode. Every method raises BackendError where TensorRT refuses."""

    def __init__(
        self,
        engine: LoadedEngine,
        context: Any,
        mode: EngineMode,
        scratch: tuple[int, int],
        stream: int,
    ) -> None:
        self.engine, self.context, self.mode, self.stream = engine, context, mode, stream
        self._shapes: dict[str, Sequence[int]] = {}
        if not context.set_optimization_profile_async(ENGINE_MODES.index(mode), stream):
            raise self._refused("the profile")
        engine.library.log.errors.clear()
        context.set_device_memory(*scratch)  # returns nothing: only the logger knows
        if engine.library.log.errors:
            raise self._refused(f"{scratch[1]:,} bytes of scratch")

    def bind(self, names: Sequence[str], addresses: Iterable[int]) -> None:
        """Set tensors' addresses from now on."""
        set_address = self.context.set_tensor_address
        for name, address in zip(names, addresses, strict=True):
            if not set_address(name, address):
                raise self._refused(f"address {address:#x} of {name}")

    def resize(self, name: str, shape: Sequence[int]) -> None:
        """Set an input's shape from now on; TensorRT hears of it where it changed."""
        if self._shapes.get(name) == shape:
            return
        if not self.context.set_input_shape(name, tuple(shape)):
            bounds = self.engine.record.shapes[self.mode].get(name)
            admits = f" (it admits {bounds[0]} to {bounds[2]})" if bounds else ""
            raise self._refused(f"shape {tuple(shape)} of {name}{admits}")
        self._shapes[name] = shape

    def run(self, subject: str) -> None:
        """Enqueue a run; errors name the subject."""
        if not self.context.execute_async_v3(self.stream):
            raise self._refused(f"a run of {subject}")

    def _refused(self, what: str) -> BackendError:
        engine = self.engine
        return engine.library.refused(f"engine {engine.graph}, profile {self.mode}: {what} refused")


def _message_log(trt: Any) -> Any:
    """A logger that keeps the last errors, as one line each."""
    severity = trt.ILogger.Severity

    class Log(trt.ILogger):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.ILogger.__init__(self)
            self.errors: deque[str] = deque(maxlen=MESSAGES)

        def log(self, level: Any, message: str) -> None:
            if level in (severity.INTERNAL_ERROR, severity.ERROR):
                self.errors.append(" ".join(message.split()))

    return Log()
