"""A decode step of k2-nano with ONNX Runtime's memory limited, in a process of its own: a limit is
for good.

    python limited_step.py BUILD SEQUENCES CACHED [GRAPH VALUE]

Sessions share one arena, of one region that cannot grow, for the outputs of nodes and for all
scratch that a kernel asks for. With a graph and the name of one of its inputs, the graph reads a
copy of that. Prints what the chain raised, or nothing.
"""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from onnx import helper

from graphs.contract.manifest import Profile
from graphs.contract.spec import BuildSpec, GraphName
from graphs.passes import pointwise
from runtime.backends import BackendError
from runtime.backends.onnxruntime import OnnxRuntimeBackend
from runtime.devices.base import HostDevice, no_progress
from runtime.devices.weights import Weights
from runtime.step.chain import Chain
from tests.support.graph_surgery import insert_before

ARENA_BYTES = 108 * 1024
STEPS = 3
PROFILE = Profile(batch=4, tokens=4, context=1024)


def open_chain(build: Path, sequences: int, cached: int, cache_rows: int = 4096) -> Chain:
    """With so many sequences of random cached rows."""
    spec = BuildSpec.load(build)
    weights = Weights.open(build, spec)
    backend = OnnxRuntimeBackend(build, spec, HostDevice(), threads=1)
    backend.load_weights(weights, no_progress)
    chain = Chain(spec, weights, backend, PROFILE, cache_rows)
    shape = (spec.config.num_hidden_layers, 1, cached, spec.config.cache_width)
    for slot in range(sequences):
        chain.cache.allocate()
        chain.cache.reserve(slot, [cached])
        rows = np.random.default_rng(slot).standard_normal(shape).astype(np.float32)
        chain.cache.commit(slot, rows, [[1] * cached])
    return chain


def step(chain: Chain) -> None:
    chain.step([[65 + slot] for slot in range(len(chain.cache.handles))])


def limit_memory() -> None:
    """Of all sessions opened from now on, together."""
    memory = ort.OrtMemoryInfo(
        "Cpu", ort.OrtAllocatorType.ORT_ARENA_ALLOCATOR, 0, ort.OrtMemType.DEFAULT
    )
    size = {"max_mem": ARENA_BYTES, "initial_chunk_size_bytes": ARENA_BYTES}
    region = {"arena_extend_strategy": 0, "max_dead_bytes_per_chunk": -1}  # doubling, if it could
    ort.create_and_register_allocator(memory, ort.OrtArenaCfg(size | region))
    session = ort.InferenceSession

    def open_limited(content: bytes, options: Any, **rest: Any) -> Any:
        options.add_session_config_entry("session.use_env_allocators", "1")
        return session(content, options, **rest)

    ort.InferenceSession = open_limited


def plant(name: str, value: str) -> None:
    """Let a graph read a copy of one of its inputs."""
    read = BuildSpec.onnx_bytes

    def changed(self: BuildSpec, build: Path, graph: GraphName) -> bytes:
        content = read(self, build, graph)
        return with_copy(onnx.load_from_string(content), value) if graph == name else content

    BuildSpec.onnx_bytes = changed  # type: ignore[method-assign]


def with_copy(model: onnx.ModelProto, value: str) -> bytes:
    reader = next(node for node in model.graph.node if value in node.input)
    reader.input[list(reader.input).index(value)] = "copied_twice"
    pairs = [(value, "copied"), ("copied", "copied_twice")]
    insert_before(model, reader, [helper.make_node("Neg", [a], [b]) for a, b in pairs])
    return bytes(model.SerializeToString())


if __name__ == "__main__":
    pointwise.LARGE = 1  # linear layers as they are at full width
    limit_memory()
    if sys.argv[4:]:
        plant(*sys.argv[4:])
    opened = open_chain(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
    try:
        for _ in range(STEPS):
            step(opened)
    except BackendError as error:
        print(error)
