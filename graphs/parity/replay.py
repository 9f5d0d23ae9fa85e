"""Run one graph on its goldens, with its taps as outputs, on ONNX Runtime's CPU provider.

At fp8 the run is fed: every FP8 linear layer whose input the reference recorded reads that, so that
one flip of e4m3 rounding, which is no error, cannot hide one that is.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from graphs.contract.spec import (
    HEAD_FILE,
    ROPE_FILE,
    BuildError,
    BuildSpec,
    GraphName,
    GraphSpec,
    TapSpec,
    expert_weight,
    layer_file,
)
from graphs.contract.tensorfile import DTYPES, Array, TensorFile
from graphs.parity.taps import to_graph, to_reference
from graphs.passes.expose_taps import PREFIX, expose_taps
from graphs.passes.feed_linears import feed_linears
from graphs.session import open_session, run

ExpertOutput = Callable[[int, Array], Array]  # an expert, a token's h [1,D] → its output [D]


def graph_cases(build: Path, spec: BuildSpec) -> list[TensorFile]:
    """The goldens of single graphs. Raises BuildError where there are none."""
    files = sorted((build / "golden").glob("*.safetensors"))
    cases = [TensorFile.open(p, spec.file_metadata(p.stem)) for p in files]
    cases = [c for c in cases if c.metadata["graph"] in spec.graphs]
    if not cases:
        raise BuildError(f"{build}: no goldens; make them with `python -m export golden`")
    return cases


def golden_inputs(golden: TensorFile) -> dict[str, Array]:
    """The golden's inputs of its graph, without weights and tables."""
    prefix = "input."
    return {n.removeprefix(prefix): a for n, a in golden.tensors.items() if n.startswith(prefix)}


def expected_tap(golden: TensorFile, tap: TapSpec) -> Array:
    """The reference's value of a tap, in the reference's layout. Raises BuildError if absent."""
    for name in (f"output.{tap.name}", f"tap.{tap.name}"):
        if name in golden.tensors:
            return golden[name]
    raise BuildError(f"{golden.path}: no {tap.name}; make it again with `python -m export golden`")


def fed_tap(golden: TensorFile, tap: TapSpec) -> Array:
    """The reference's value of a tap before an output's type rounded it."""
    expected = expected_tap(golden, tap)
    before = golden.tensors.get(f"tap.{tap.name}")
    return expected if before is None else before.reshape(expected.shape)


def graph_weights(
    build: Path, spec: BuildSpec, graph: GraphSpec, golden: TensorFile, layer: int | None = None
) -> dict[str, Array]:
    """The packed weights, and tables, that a golden's graph reads; of another `layer` if given.

    Raises BuildError.
    """
    if graph.name == "head":
        file = TensorFile.open(build / HEAD_FILE, spec.file_metadata("head"))
        return {t.name: file[t.name] for t in graph.weights}
    layer = int(golden.metadata["layer"]) if layer is None else layer
    file = TensorFile.open(build / layer_file(layer), spec.file_metadata(f"layer {layer}"))
    if graph.name == "experts":
        slots = golden["slot_experts"].tolist()
        names = {t.name: expert_weight(t.name, slots[slot_of(t.name)]) for t in graph.weights}
        return {name: file[source] for name, source in names.items()}
    tables = TensorFile.open(build / ROPE_FILE, spec.file_metadata("rope"))
    return {t.name: file[t.name] for t in graph.weights} | tables.tensors


def slot_of(name: str) -> int:
    """The number of the expert slot that a weight or tap of the experts graph belongs to."""
    return int(name.split(".")[1])


@dataclass(frozen=True)
class GraphReplay:
    """One graph's sessions: with taps, and fed at fp8; at fp8 also as it is.

    `fed` maps each input of a linear layer that is fed to the tap that feeds it.
    """

    build: Path
    spec: BuildSpec
    graph: GraphSpec
    tapped: Any
    fed: Mapping[str, TapSpec]
    free: Any | None

    @classmethod
    def open(cls, build: Path, spec: BuildSpec, name: GraphName, threads: int) -> "GraphReplay":
        """Raises BuildError where a graph is absent or was changed after its export."""
        graph, content = spec.graphs[name], spec.onnx_bytes(build, name)
        model = expose_taps(onnx.load_from_string(content), graph.taps)
        model, fed = feed_linears(model, graph.taps)
        tapped = open_session(spec, model.SerializeToString(), threads)
        free = open_session(spec, content, threads) if fed else None
        return cls(build, spec, graph, tapped, fed, free)

    def run(self, golden: TensorFile, layer: int | None = None) -> dict[str, Array]:
        """All taps of a case in the reference's layout; with another `layer`'s weights if given."""
        inputs = self._inputs(golden, layer)
        for name, tap in self.fed.items():
            inputs[name] = to_graph(tap, fed_tap(golden, tap)).astype(np.float32)
        outputs = self._outputs(golden)
        taps = {PREFIX + t.name: t for t in self.graph.taps if t.name not in outputs}
        values = run(self.tapped, inputs, outputs, list(taps))
        for name, tap in taps.items():
            shape = expected_tap(golden, tap).shape
            outputs[tap.name] = to_reference(tap, values[name], shape)
        return {tap.name: outputs[tap.name] for tap in self.graph.taps}

    def run_free(self, golden: TensorFile) -> dict[str, Array]:
        """The outputs of a case in which an fp8 graph runs on its own activations."""
        assert self.free is not None, "only fp8 graphs are fed"
        outputs = self._outputs(golden)
        run(self.free, self._inputs(golden, None), outputs)
        return outputs

    def _inputs(self, golden: TensorFile, layer: int | None) -> dict[str, Array]:
        weights = graph_weights(self.build, self.spec, self.graph, golden, layer)
        return weights | golden_inputs(golden)

    def _outputs(self, golden: TensorFile) -> dict[str, Array]:
        """Arrays of the right type for the graph's outputs, filled with NaN or −1."""
        outputs = {}
        for t in self.graph.outputs:
            dtype = DTYPES[t.dtype][1]
            fill = -1 if t.dtype == "int64" else np.nan
            outputs[t.name] = np.full(golden[f"output.{t.name}"].shape, fill, dtype=dtype)
        return outputs

    def expert_output(self, layer: int) -> ExpertOutput:
        """A function that runs one of a layer's experts on a token, by the graph `experts`."""
        file = TensorFile.open(
            self.build / layer_file(layer), self.spec.file_metadata(f"layer {layer}")
        )

        def output(expert: int, h_1D: Array) -> Array:
            acc = np.zeros(h_1D.shape, np.float32)
            inputs = {t.name: file[expert_weight(t.name, expert)] for t in self.graph.weights}
            inputs |= {"h": np.ascontiguousarray(h_1D), "acc": acc}
            for slot in range(self.spec.slots):
                inputs[f"rows_{slot}"] = np.zeros(1, np.int64)
                inputs[f"gates_{slot}"] = np.full((1, 1), float(slot == 0), np.float32)
            result: Array = np.empty_like(acc)
            run(self.free or self.tapped, inputs, {"acc_out": result})
            row: Array = result[0]
            return row

        return output
