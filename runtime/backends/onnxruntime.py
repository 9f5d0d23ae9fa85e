"""ONNX Runtime: the default backend on the CPU, and the one that others are compared with.

One session per graph serves all layers. A layer's weights are bound once, on the CPU as views of
the mapped file; a step binds only what lies elsewhere than in the last one, or has another shape.
There, bf16 and fp8 graphs run in their widened form, on the same files and cache bytes as the
engines; on a GPU they run as they were exported.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from graphs.contract.config import BlockType
from graphs.contract.spec import GRAPHS, BuildSpec, GraphName, expert_weight
from graphs.contract.tensorfile import Array, TensorFile
from graphs.session import ONNX_TYPE, open_session, ort_value
from runtime.backends import BackendError, ExpertSlot
from runtime.devices.base import Buffer, Device, LoadProgress
from runtime.devices.weights import Weights

_Place = tuple[str, int, int, tuple[int, ...], int]  # device, its number, type, shape, address


class OnnxRuntimeBackend:
    """runtime.backends.Backend on ONNX Runtime's sessions."""

    scratch_bytes = 0  # ONNX Runtime's arena grows as it needs; its size is not known beforehand

    def __init__(
        self,
        build: Path,
        spec: BuildSpec,
        device: Device,
        threads: int = 0,
        batch_invariant: bool = False,
        rounded: bool = False,
    ) -> None:
        """`batch_invariant`: a lone row runs as two, since one row has a kernel of its own.

        A token's result is then the same, bit for bit, whatever is decoded with it, as long as the
        cache's stride is the same. Raises BuildError where a graph is absent or was changed.
        """
        self.spec, self.device = spec, device
        self.least_rows = 2 if batch_invariant else 1
        self.sessions: dict[GraphName, Any] = {}
        for graph in GRAPHS:
            content = spec.onnx_bytes(build, graph)
            self.sessions[graph] = open_session(
                spec, content, threads, device.stream, batch_invariant, rounded
            )
        self.layers: list[_Binding] = []
        self.experts_binding, self.head_binding = self._binding("experts"), self._binding("head")
        self._expert_weights: list[dict[int, list[_Place]]] = []  # by layer and expert
        self._placed: list[dict[str, Buffer]] = []  # keeps alive what is bound by address alone
        self._slot_weights = [[t.name for t in weights] for weights in spec.slot_weights]

    def load_weights(self, weights: Weights, progress: LoadProgress) -> None:
        tables, head = (self._place(file, progress) for file in (weights.rope, weights.head))
        self.head_binding.bind(head)
        for layer, file in enumerate(weights.layers):
            block = self.spec.config.block_type(layer)
            placed = self._place(file, progress)
            weight_names = [t.name for t in self.spec.graphs[block].weights]
            self.layers.append(self._binding(block))
            self.layers[-1].bind(tables | {name: placed[name] for name in weight_names})
            experts = range(self.spec.config.n_routed_experts if block == "moe" else 0)
            self._expert_weights.append({e: self._weights_of(e, placed) for e in experts})

    def block(
        self,
        block: BlockType,
        layer: int,
        inputs: Mapping[str, Buffer],
        outputs: Mapping[str, Buffer],
        step_group: int = 0,
    ) -> None:
        self.layers[layer].run(inputs, outputs, f"layer {layer}")

    def experts(
        self,
        layer: int,
        runs: Sequence[Sequence[ExpertSlot]],
        h: Buffer,
        acc: Buffer,
        spare: Buffer,
    ) -> tuple[Buffer, Buffer]:
        weights = self._expert_weights[layer]
        for run in runs:
            for index, slot in enumerate(run):
                names = self._slot_weights[index]
                for name, place in zip(names, weights[slot.expert], strict=True):
                    self.experts_binding.bind_at(name, place)
                self.experts_binding.give(f"rows_{index}", slot.rows)
                self.experts_binding.give(f"gates_{index}", slot.gates)
            self.experts_binding.run({"h": h, "acc": acc}, {"acc_out": spare}, f"layer {layer}")
            acc, spare = spare, acc
        return acc, spare

    def head(self, hidden: Buffer, logits: Buffer) -> None:
        self.head_binding.run({"hidden": hidden}, {"logits": logits}, "the model")

    def close(self) -> None:
        """Do nothing: nothing is kept from one start to the next."""

    def _binding(self, graph: GraphName) -> "_Binding":
        return _Binding(graph, self.sessions[graph], self.device)

    def _place(self, file: TensorFile, progress: LoadProgress) -> dict[str, Buffer]:
        self._placed.append(self.device.place(file.tensors, progress))
        return self._placed[-1]

    def _weights_of(self, expert: int, placed: Mapping[str, Buffer]) -> list[_Place]:
        """Places of an expert's weights, in the order of an expert slot's inputs."""
        names = (expert_weight(name, expert) for name in self._slot_weights[0])
        return [_place(self.device, placed[name]) for name in names]


class _Binding:
    """The places that a graph's inputs and outputs are bound to."""

    def __init__(self, graph: GraphName, session: Any, device: Device) -> None:
        self.graph, self.session, self.device = graph, session, device
        self._io = session.io_binding()
        self.places: dict[str, _Place] = {}
        self._copies: dict[tuple[str, int], tuple[Array, _Place]] = {}

    def bind(self, buffers: Mapping[str, Buffer]) -> None:
        for name, buffer in buffers.items():
            self.bind_at(name, _place(self.device, buffer))

    def bind_at(self, name: str, place: _Place) -> None:
        if self.places.get(name) != place:
            self._io.bind_input(name, *place)
            self.places[name] = place

    def give(self, name: str, array: Array) -> None:
        """Bind an input from the host as it is now.

        On the CPU it is copied into an array of this binding, one for each length, so that the
        bound one mostly serves again. For a GPU it is copied there at once.
        """
        if self.device.kind != "cpu":
            self._io.bind_ortvalue_input(name, ort_value(array))
            return
        key = name, len(array)
        if key not in self._copies:
            copy = array.copy()
            self._copies[key] = copy, _place(self.device, copy)
        copy, place = self._copies[key]
        copy[...] = array
        self.bind_at(name, place)

    def run(
        self, inputs: Mapping[str, Buffer], outputs: Mapping[str, Buffer], subject: str
    ) -> None:
        """Raises BackendError naming the subject."""
        self.bind(inputs)
        for name, buffer in outputs.items():
            place = _place(self.device, buffer)
            if self.places.get(name) != place:
                self._io.bind_output(name, *place)
                self.places[name] = place
        try:
            self.session.run_with_iobinding(self._io)
        except Exception as e:  # ONNX Runtime has a type for each status
            raise BackendError(f"graph {self.graph}, {subject}: {e}") from e


def _place(device: Device, buffer: Buffer) -> _Place:
    """A buffer as ONNX Runtime takes it: by address, which an empty one has too."""
    onnx_type, address = ONNX_TYPE[device.dtype(buffer)], device.address(buffer)
    return device.kind, 0, onnx_type, tuple(buffer.shape), address
