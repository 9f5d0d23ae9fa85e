"""ONNX Runtime: the default backend, on the CPU, and the oracle of every other one.

One session per graph serves all layers. A layer's weights are bound once, on the CPU as views of
the mapped file; a step binds only what moves. There, bf16 and fp8 graphs run in their widened form,
on the same files and cache bytes as the engines; on a GPU they run as they were exported.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from graphs.config import BlockType
from graphs.replay import slot_of
from graphs.session import ONNX_TYPE, open_session, ort_value
from graphs.spec import GRAPHS, BuildSpec, GraphName, expert_weight
from graphs.tensorfile import TensorFile
from runtime.backends import BackendError, Slot
from runtime.device import Buffer, Device, Progress
from runtime.weights import Weights


class OnnxRuntimeBackend:
    """See the module's docstring; the protocol is `runtime.backends.Backend`."""

    scratch_bytes = 0  # its own arena's, not to be known beforehand

    def __init__(
        self,
        build: Path,
        spec: BuildSpec,
        device: Device,
        threads: int = 0,
        batch_invariant: bool = True,
    ) -> None:
        """`batch_invariant`: a lone row runs as two, since one row has a kernel of its own.

        What a token gives is then the same, bit for bit, whatever is decoded beside it, as long as
        the cache's stride is the same. Raises BuildError where a graph is absent or was changed.
        """
        self.spec, self.device = spec, device
        self.least_rows = 2 if batch_invariant else 1
        self.sessions: dict[GraphName, Any] = {}
        for graph in GRAPHS:
            content = spec.onnx_bytes(build, graph)
            self.sessions[graph] = open_session(spec, content, threads, device.stream)
        self.layers: list[Any] = []
        self.expert_weights: list[dict[str, Buffer]] = []
        self._placed: list[dict[str, Buffer]] = []  # what is bound by address alone has to stay
        self.experts_binding = self.sessions["experts"].io_binding()
        self.head_binding = self.sessions["head"].io_binding()

    def load_weights(self, weights: Weights, progress: Progress) -> None:
        tables, head = (self._place(file, progress) for file in (weights.rope, weights.head))
        for layer, file in enumerate(weights.layers):
            block = self.spec.config.block_type(layer)
            placed = self._place(file, progress)
            binding = self.sessions[block].io_binding()
            own = {t.name: placed[t.name] for t in self.spec.graphs[block].weights}
            for name, buffer in (tables | own).items():
                self._bind(binding.bind_input, name, buffer)
            self.layers.append(binding)
            self.expert_weights.append({n: b for n, b in placed.items() if n not in own})
        for name, buffer in head.items():
            self._bind(self.head_binding.bind_input, name, buffer)

    def block(
        self,
        block: BlockType,
        layer: int,
        inputs: Mapping[str, Buffer],
        outputs: Mapping[str, Buffer],
        group: int = 0,
    ) -> None:
        self._run(block, self.layers[layer], inputs, outputs, f"layer {layer}")

    def experts(
        self,
        layer: int,
        groups: Sequence[Sequence[Slot]],
        h: Buffer,
        acc: Buffer,
        spare: Buffer,
    ) -> tuple[Buffer, Buffer]:
        for group in groups:
            self._bind_experts(layer, group)
            inputs = {"h": h, "acc": acc}
            self._run("experts", self.experts_binding, inputs, {"acc_out": spare}, f"layer {layer}")
            acc, spare = spare, acc
        return acc, spare

    def head(self, hidden: Buffer, logits: Buffer) -> None:
        self._run("head", self.head_binding, {"hidden": hidden}, {"logits": logits}, "the model")

    def close(self) -> None:
        """Nothing is kept from one start to the next."""

    def _place(self, file: TensorFile, progress: Progress) -> dict[str, Buffer]:
        self._placed.append(self.device.place(file.tensors, progress))
        return self._placed[-1]

    def _bind_experts(self, layer: int, group: Sequence[Slot]) -> None:
        binding, weights = self.experts_binding, self.expert_weights[layer]
        for tensor in self.spec.graphs["experts"].weights:
            source = expert_weight(tensor.name, group[slot_of(tensor.name)].expert)
            self._bind(binding.bind_input, tensor.name, weights[source])
        for index, slot in enumerate(group):
            binding.bind_ortvalue_input(f"rows_{index}", ort_value(slot.rows))
            binding.bind_ortvalue_input(f"gates_{index}", ort_value(slot.gates))

    def _run(
        self,
        graph: GraphName,
        binding: Any,
        inputs: Mapping[str, Buffer],
        outputs: Mapping[str, Buffer],
        of: str,
    ) -> None:
        for name, buffer in inputs.items():
            self._bind(binding.bind_input, name, buffer)
        for name, buffer in outputs.items():
            self._bind(binding.bind_output, name, buffer)
        try:
            self.sessions[graph].run_with_iobinding(binding)
        except Exception as e:  # a type of its own for each of its statuses
            raise BackendError(f"graph {graph}, {of}: {e}") from e

    def _bind(self, bind: Callable[..., None], name: str, buffer: Buffer) -> None:
        """In place: an address, which also an empty buffer has."""
        device = self.device
        onnx_type, address = ONNX_TYPE[device.dtype(buffer)], device.address(buffer)
        bind(name, device.kind, 0, onnx_type, tuple(buffer.shape), address)
