"""An execution context of TensorRT's double: what it refuses, and how a run of it is done.

The numbers are those of tests/support/doubles/tensorrt.py.
"""

import ctypes
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from graphs.contract.tensorfile import ALIGNMENT
from graphs.session import ONNX_TYPE
from tests.support.doubles.cuda import NAN_BYTE, GpuLostError

ITEM_SIZE = {onnx_type: dtype.itemsize for dtype, onnx_type in ONNX_TYPE.items()}


@dataclass
class Fault:
    """What the `run`th run of a graph from now on does, once: `refuse`, `lose` the GPU, or write
    NaN to all, or to one row, of an output. Where a size is given only runs are counted whose first
    input is of that size along its first axis.
    """

    graph: str
    run: int
    deed: str
    row: int | None
    size: int | None

    def due(self, graph: str, size: int) -> bool:
        if graph == self.graph and self.size in (None, size):
            self.run -= 1
        return self.run == 0


@dataclass(frozen=True)
class Tensor:
    output: bool
    onnx_type: int
    dims: tuple[int | str, ...]


def _counted(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(self: "ContextDouble", *arguments: Any) -> Any:
        self.double.calls[method.__name__] += 1
        return method(self, *arguments)

    return call


class ContextDouble:
    def __init__(self, engine: Any) -> None:
        self.engine, self.double = engine, engine.double
        self.profile = -1
        self.scratch: tuple[int, int] | None = None
        self.fixed: dict[str, tuple[int, ...]] = {
            name: tensor.dims
            for name, tensor in engine.tensors.items()
            if not tensor.output and all(isinstance(d, int) for d in tensor.dims)
        }
        self.shapes = dict(self.fixed)
        self.addresses: dict[str, int] = {}

    @_counted
    def set_optimization_profile_async(self, profile_index: int, stream_handle: int) -> bool:
        if not 0 <= profile_index < len(self.engine.profiles):
            return self._refuse(f"profile {profile_index} of {len(self.engine.profiles)}")
        if stream_handle != self.double.driver.stream:
            return self._refuse(f"profile {profile_index}: no stream {stream_handle}")
        self.profile, self.shapes = profile_index, dict(self.fixed)  # others are to be set again
        return True

    @_counted
    def set_device_memory(self, memory: int, size: int) -> None:
        needed = self.engine.get_device_memory_size_for_profile_v2(max(self.profile, 0))
        if size < needed:
            self._refuse(f"device memory of {size} bytes, {needed} needed")
        elif memory % ALIGNMENT:
            self._refuse(f"device memory at {memory:#x}: misaligned address")
        else:
            self.scratch = memory, size

    @_counted
    def set_input_shape(self, name: str, shape: Sequence[int]) -> bool:
        tensor, shape = self.engine.tensors.get(name), tuple(shape)
        if tensor is None or tensor.output:
            return self._refuse(f"set_input_shape: no input {name!r}")
        if self.profile < 0:
            return self._refuse(f"set_input_shape: {name}: no profile set")
        least, _, greatest = self.engine.get_tensor_profile_shape(name, self.profile)
        if len(shape) != len(least):
            return self._refuse(f"set_input_shape: {name}: {len(least)} dimensions, not {shape}")
        if not all(a <= n <= b for a, n, b in zip(least, shape, greatest, strict=True)):
            return self._refuse(
                f"set_input_shape: {name}: {shape} not in {least}..{greatest} of profile "
                f"{self.profile}"
            )
        self.shapes[name] = shape
        return True

    @_counted
    def set_tensor_address(self, name: str, memory: int) -> bool:
        if name not in self.engine.tensors:
            return self._refuse(f"set_tensor_address: no tensor {name!r}")
        if not memory or memory % ALIGNMENT:
            return self._refuse(f"set_tensor_address: {name}: misaligned address {memory:#x}")
        self.addresses[name] = memory
        return True

    @_counted
    def execute_async_v3(self, stream_handle: int) -> bool:
        first = next(iter(self.engine.tensors))
        fault = self.double.fault(self.engine.graph, self.shapes.get(first, (0,))[0])
        if fault and fault.deed == "refuse":
            return self._refuse("a planted fault")
        if stream_handle != self.double.driver.stream:
            return self._refuse(f"no stream {stream_handle}")
        if problem := self._unset():
            return self._refuse(problem)
        try:
            run = _Run.of(self)
        except ValueError as e:
            return self._refuse(str(e))
        if problem := run.misplaced():
            return self._refuse(problem)
        self.double.driver.submit(functools.partial(run.execute, fault))
        return True

    def _refuse(self, problem: str) -> bool:
        self.engine.runtime._error(f"IExecutionContext: Error Code 3: {problem}")
        return False

    def _unset(self) -> str | None:
        if self.profile < 0:
            return "no optimization profile set"
        if self.scratch is None:
            return "no device memory set"
        for name, tensor in self.engine.tensors.items():
            if not tensor.output and name not in self.shapes:
                return f"{name}: shape not set"
            if name not in self.addresses:
                return f"{name}: address not set"
        return None


@dataclass(frozen=True)
class _Run:
    """What a context was set to when it was run: it may be set anew before that is done."""

    engine: Any
    shapes: dict[str, tuple[int, ...]]
    addresses: dict[str, int]
    scratch: tuple[int, int]  # address, and the bytes that this run uses

    @classmethod
    def of(cls, context: ContextDouble) -> "_Run":
        """Raises ValueError where the inputs' shapes contradict each other."""
        engine = context.engine
        sizes: dict[str, int] = {}
        for name, shape in context.shapes.items():
            for dim, size in zip(engine.tensors[name].dims, shape, strict=True):
                if isinstance(dim, str) and sizes.setdefault(dim, size) != size:
                    raise ValueError(f"{name}: {dim} is {size}, and {sizes[dim]} elsewhere")
        outputs = {
            name: tuple(_size(dim, sizes) for dim in tensor.dims)
            for name, tensor in engine.tensors.items()
            if tensor.output
        }
        assert context.scratch
        used = engine.get_device_memory_size_for_profile_v2(context.profile)
        scratch = context.scratch[0], used
        return cls(engine, context.shapes | outputs, dict(context.addresses), scratch)

    def misplaced(self) -> str | None:
        """What the memory of the tensors lacks."""
        spans = {name: self._span(name) for name in self.engine.tensors} | {"scratch": self.scratch}
        for name, span in spans.items():
            if not self.engine.double.driver.holds(*span):
                return f"{name}: {span[1]} bytes at {span[0]:#x} are not allocated"
        written = [name for name, tensor in self.engine.tensors.items() if tensor.output]
        for name in (*written, "scratch"):
            for other, span in spans.items():
                if other != name and _overlap(spans[name], span):
                    return f"{name} overlaps {other}"
        return None

    def execute(self, fault: Fault | None) -> None:
        """When its turn comes on the stream."""
        if fault and fault.deed == "lose":
            raise GpuLostError("a planted fault")
        ctypes.memset(self.scratch[0], NAN_BYTE, self.scratch[1])
        session = self.engine.session()
        binding = session.io_binding()
        for name, tensor in self.engine.tensors.items():
            bind = binding.bind_output if tensor.output else binding.bind_input
            bind(name, "cpu", 0, tensor.onnx_type, self.shapes[name], self.addresses[name])
        session.run_with_iobinding(binding)
        if fault:
            start, count = self._span(fault.deed)
            if fault.row is not None:
                count //= self.shapes[fault.deed][0]
                start += fault.row * count
            ctypes.memset(start, NAN_BYTE, count)

    def _span(self, name: str) -> tuple[int, int]:
        count = ITEM_SIZE[self.engine.tensors[name].onnx_type]
        for size in self.shapes[name]:
            count *= size
        return self.addresses[name], count


def _overlap(one: tuple[int, int], other: tuple[int, int]) -> bool:
    return max(one[0], other[0]) < min(sum(one), sum(other))


def _size(dim: int | str, sizes: dict[str, int]) -> int:
    if isinstance(dim, int):
        return dim
    return functools.reduce(lambda a, b: a * sizes[b], dim.split("*"), 1)
