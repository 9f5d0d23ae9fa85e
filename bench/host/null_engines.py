"""Engines that do nothing, for a model of any size, so that only the chain is measured.

Weights have their shapes and one address for all: nobody reads them. The routing is written once
where the chain reads it: each row chooses other experts.
"""

import dataclasses
import hashlib
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import torch
from onnx import helper

from graphs.contract.config import BlockType
from graphs.contract.manifest import Profile
from graphs.contract.spec import BuildSpec, GraphName, GraphSpec, TensorSpec
from graphs.contract.tensorfile import DTYPES, Array, TensorFile
from graphs.ops import OPSET
from graphs.session import ONNX_TYPE
from runtime.backends import Backend, ExpertSlot
from runtime.backends.engine import LoadedEngine
from runtime.backends.onnxruntime import OnnxRuntimeBackend
from runtime.backends.tensorrt import TensorRTBackend
from runtime.devices.base import Buffer, Device, HostDevice, LoadProgress, no_progress
from runtime.devices.cuda import CudaDevice
from runtime.devices.driver import Event
from runtime.devices.weights import Weights
from runtime.step.chain import Chain

OpenBackend = Callable[[BuildSpec, Profile, int], Backend]


def null_chain(
    spec: BuildSpec, open_backend: OpenBackend, profile: Profile, sequences: int, cached: int
) -> Chain:
    """A chain whose cache holds sequences of `cached` rows each, all zeros."""
    weights = null_weights(spec)
    backend = open_backend(spec, profile, sequences)
    backend.load_weights(weights, no_progress)
    chain = Chain(spec, weights, backend, profile, sequences * 2 * cached)
    M = max(sequences, backend.least_rows)
    chain.device.write(chain.buffers.routing.buffers(M)[0], choice(spec, M))
    for _ in range(sequences):
        chain.cache.allocate()
    chain.cache.reserve(0, [cached] * sequences)
    for sequence in chain.cache.slots.active:
        sequence.tokens.extend([0] * cached)
    return chain


def choice(spec: BuildSpec, rows: int) -> Array:
    """int64 [M, K]: experts of each row, drawn independently."""
    config, random = spec.config, np.random.default_rng(0)
    E, K = config.n_routed_experts, config.num_experts_per_tok
    return np.stack([random.permutation(E)[:K] for _ in range(rows)])


def null_weights(spec: BuildSpec) -> Weights:
    """Views of one allocation, whose pages are never touched."""
    config, graphs = spec.config, spec.graphs
    vocabulary = TensorSpec("embed", spec.cache_dtype, (config.vocab_size, config.hidden_size))
    tables = [t for t in graphs["dense"].inputs if t.kind == "table"]
    everything = [vocabulary, *tables, *(t for graph in graphs.values() for t in graph.weights)]
    memory = np.zeros(max(_bytes_of(tensor) for tensor in everything), np.uint8)

    def array(tensor: TensorSpec) -> Array:
        return memory[: _bytes_of(tensor)].view(DTYPES[tensor.dtype][1]).reshape(tensor.shape({}))

    def file(tensors: Iterable[tuple[str, TensorSpec]]) -> TensorFile:
        return TensorFile(Path(), {}, {name: array(tensor) for name, tensor in tensors})

    kinds = {config.block_type(layer): layer for layer in range(config.num_hidden_layers)}
    blocks = {kind: file(spec.layer_tensors(layer).items()) for kind, layer in kinds.items()}
    layers = [blocks[config.block_type(layer)] for layer in range(config.num_hidden_layers)]
    head, rope = ([(t.name, t) for t in tensors] for tensors in (graphs["head"].weights, tables))
    return Weights(array(vocabulary), tuple(layers), file(head), file(rope))


def _bytes_of(tensor: TensorSpec) -> int:
    shape = tensor.shape({})
    return int(np.prod(shape, dtype=np.int64)) * DTYPES[tensor.dtype][1].itemsize


class NullBackend:
    """A backend that does nothing."""

    scratch_bytes, least_rows = 0, 1

    def __init__(self) -> None:
        self.device: Device = HostDevice()

    def load_weights(self, weights: Weights, progress: LoadProgress) -> None:
        pass

    def block(
        self,
        block: BlockType,
        layer: int,
        inputs: Mapping[str, Buffer],
        outputs: Mapping[str, Buffer],
        step_group: int = 0,
    ) -> None:
        pass

    def experts(
        self,
        layer: int,
        runs: Sequence[Sequence[ExpertSlot]],
        h: Buffer,
        acc: Buffer,
        spare: Buffer,
    ) -> tuple[Buffer, Buffer]:
        return acc, spare

    def head(self, hidden: Buffer, logits: Buffer) -> None:
        pass

    def close(self) -> None:
        pass


def null_onnxruntime(folder: Path, spec: BuildSpec, sequences: int) -> Backend:
    """ONNX Runtime on graphs that read nothing and whose outputs are constants."""
    (folder / "onnx").mkdir(parents=True, exist_ok=True)
    graphs = {}
    for name, graph in spec.graphs.items():
        content = _constant_graph(graph, sequences, choice(spec, sequences)).SerializeToString()
        (folder / graph.file).write_bytes(content)
        digest = hashlib.sha256(content).hexdigest()
        graphs[name] = dataclasses.replace(graph, sha256=digest)
    # called fp32, it is not widened
    unwidened = dataclasses.replace(spec, graphs=graphs, precision="fp32")
    return OnnxRuntimeBackend(folder, unwidened, HostDevice(), 1)


def _constant_graph(graph: GraphSpec, rows: int, experts: Array) -> onnx.ModelProto:
    sizes = {"batch": rows, "tokens": 1 if graph.name != "experts" else rows, "rows": rows}
    values = [
        experts if t.name == "experts" else np.zeros(t.shape(sizes), DTYPES[t.dtype][1])
        for t in graph.outputs
    ]
    constants = [
        helper.make_tensor(f"{t.name}_is", _onnx_type(t), array.shape, array.tobytes(), raw=True)
        for t, array in zip(graph.outputs, values, strict=True)
    ]
    nodes = [helper.make_node("Identity", [f"{t.name}_is"], [t.name]) for t in graph.outputs]
    inputs, outputs = (list(map(_value_info, side)) for side in (graph.inputs, graph.outputs))
    made = helper.make_graph(nodes, graph.name, inputs, outputs, initializer=constants)
    return helper.make_model(made, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=11)


def _onnx_type(tensor: TensorSpec) -> int:
    return int(ONNX_TYPE[DTYPES[tensor.dtype][1]])


def _value_info(tensor: TensorSpec) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(tensor.name, _onnx_type(tensor), tensor.dims)


class NullContext:
    """An IExecutionContext that agrees to everything."""

    def set_optimization_profile_async(self, index: int, stream: int) -> bool:
        return True

    def set_device_memory(self, address: int, size: int) -> None:
        pass

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        return True

    def set_tensor_address(self, name: str, address: int) -> bool:
        return True

    def execute_async_v3(self, stream: int) -> bool:
        return True


class NullDriver:
    """runtime.devices.driver.Driver on the host's memory, which does its work at once."""

    name, capability, stream = "nothing", (12, 0), 1
    bandwidth, cache_bytes = 0.0, 0

    def memory(self) -> tuple[int, int]:
        return 2**40, 2**40

    def empty(self, count: int) -> torch.Tensor:
        block = torch.empty(count + 256, dtype=torch.uint8)
        return block[-block.data_ptr() % 256 :][:count]

    def staging(self, count: int) -> torch.Tensor:
        return torch.empty(count, dtype=torch.uint8)

    def event(self) -> Event:
        raise NotImplementedError("the wall clock is enough where nothing is done")

    def submit(self, work: Callable[[], object]) -> None:
        work()

    def wait(self) -> None:
        pass


class NullGpu(CudaDevice):
    """A GPU that copies no weights: they have one address for all."""

    def place(self, tensors: Mapping[str, Array], progress: LoadProgress) -> dict[str, Buffer]:
        return dict.fromkeys(tensors, self.zeros((1,), np.dtype(np.uint8)))


def null_tensorrt(spec: BuildSpec, profile: Profile) -> Backend:
    """The TensorRT backend on contexts that agree to everything."""
    strategy = SimpleNamespace(USER_MANAGED=None)
    trt = SimpleNamespace(ExecutionContextAllocationStrategy=strategy)
    library: Any = SimpleNamespace(trt=trt, log=SimpleNamespace(errors=deque()))
    opened = SimpleNamespace(
        device_memory_size_v2=0,
        get_device_memory_size_for_profile_v2=lambda index: 0,
        create_execution_context=lambda how: NullContext(),
    )
    record: Any = None  # read only where a shape is refused
    engines: dict[GraphName, LoadedEngine] = {
        graph: LoadedEngine(library, graph, opened, record) for graph in spec.graphs
    }
    return TensorRTBackend(spec, profile, NullGpu(NullDriver()), engines, [])
