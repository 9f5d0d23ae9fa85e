"""ONNX Runtime on the CPU: the default backend and the oracle of every other one.

One session per graph serves all layers. A layer's weights are bound once, as views of the mapped
file; a step binds only what moves. At bf16 and fp8 the graphs run in their widened form, on the
same files and cache bytes as the engines.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from graphs.config import BlockType
from graphs.session import open_session, ort_value
from graphs.spec import GRAPHS, BuildSpec, GraphName, expert_weight
from graphs.tensorfile import Array
from runtime.weights import Weights


class OnnxRuntimeBackend:
    """See the module's docstring; the protocol is `runtime.backends.Backend`."""

    def __init__(
        self,
        build: Path,
        spec: BuildSpec,
        weights: Weights,
        threads: int = 0,
        progress: Callable[[str], None] = lambda what: None,
    ) -> None:
        """Raises BuildError where a graph is absent or was changed after its export."""
        self.spec = spec
        self.sessions: dict[GraphName, Any] = {}
        for graph in GRAPHS:
            progress(f"graph {graph}")
            content = spec.onnx_bytes(build, graph)
            self.sessions[graph] = open_session(spec, content, threads)
        tables = {name: ort_value(array) for name, array in weights.rope.tensors.items()}
        self.layers: list[Any] = []
        self.expert_weights: list[dict[str, Any]] = []
        for layer, file in enumerate(weights.layers):
            progress(f"layer {layer}")
            block = spec.config.block_type(layer)
            binding = self.sessions[block].io_binding()
            for name, table in tables.items():
                binding.bind_ortvalue_input(name, table)
            for tensor in spec.graphs[block].weights:
                binding.bind_ortvalue_input(tensor.name, ort_value(file[tensor.name]))
            self.layers.append(binding)
            routed = {n: t for n, t in file.tensors.items() if n.startswith("experts.")}
            self.expert_weights.append({n: ort_value(t) for n, t in routed.items()})
        self.experts_binding = self.sessions["experts"].io_binding()
        self.head_binding = self.sessions["head"].io_binding()
        for tensor in spec.graphs["head"].weights:
            self.head_binding.bind_ortvalue_input(tensor.name, ort_value(weights.head[tensor.name]))

    def block(
        self,
        block: BlockType,
        layer: int,
        inputs: Mapping[str, Array],
        outputs: Mapping[str, Array],
    ) -> None:
        self._run(block, self.layers[layer], inputs, outputs)

    def experts(
        self,
        layer: int,
        chosen: Sequence[int],
        inputs: Mapping[str, Array],
        outputs: Mapping[str, Array],
    ) -> None:
        weights = self.expert_weights[layer]
        for tensor in self.spec.graphs["experts"].weights:
            slot = int(tensor.name.split(".")[1])
            source = weights[expert_weight(tensor.name, chosen[slot])]
            self.experts_binding.bind_ortvalue_input(tensor.name, source)
        self._run("experts", self.experts_binding, inputs, outputs)

    def head(self, hidden: Array, logits: Array) -> None:
        self._run("head", self.head_binding, {"hidden": hidden}, {"logits": logits})

    def _run(
        self,
        graph: GraphName,
        binding: Any,
        inputs: Mapping[str, Array],
        outputs: Mapping[str, Array],
    ) -> None:
        for name, array in inputs.items():
            binding.bind_ortvalue_input(name, ort_value(array))
        for name, array in outputs.items():
            binding.bind_ortvalue_output(name, ort_value(array))
        self.sessions[graph].run_with_iobinding(binding)
