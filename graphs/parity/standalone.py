"""One graph with one layer's weights and its golden, in a folder that Polygraphy takes as it is.

    model.onnx           the widened graph for the golden's sizes, its weights as initialisers
    weights.safetensors  these weights, and the rope tables
    inputs.json          the golden's inputs, for --load-inputs
    outputs.json         what the reference made of them, for --load-outputs

Polygraphy's runner takes no bf16 and no FP8, and its JSON would lose them. So what is bf16 at the
graph's border is fp32 here, of the same values: inputs, outputs, and weights, or `debug reduce`
would cut behind their Casts and have nothing to feed there. FP8 weights stay. A MoE block's experts
are sorted, since Polygraphy knows no sets; whether a difference is a tie, `graphs parity` says.

Its measure is the signal-to-noise ratio: parity's relative RMS in dB. It asks for no scale, so one
threshold serves every value of the graph, and `debug reduce` can use it to find the node at which
another runner, or an edited copy, first goes another way than the copy did on ONNX Runtime.
"""

import math
import re
import shlex
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto

from graphs.contract.spec import BuildError, BuildSpec, GraphName
from graphs.contract.tensorfile import DTYPES, Array, TensorFile, TensorWriter, read_header
from graphs.parity.compare import limit_for
from graphs.parity.replay import golden_inputs, graph_cases, graph_weights
from graphs.passes.embed_weights import Span, embed_weights
from graphs.passes.freeze import freeze
from graphs.passes.sort_experts import sort_experts
from graphs.passes.widen import widen

MODEL, WEIGHTS, INPUTS, OUTPUTS = "model.onnx", "weights.safetensors", "inputs.json", "outputs.json"
LAYERS, LAYER_INPUTS = "layers.json", "layer_inputs.json"  # what `record` and `merge` write

PIECE = 64 << 20  # bytes of a weight that are held at a time
_BF16, _FP8 = TensorProto.BFLOAT16, TensorProto.FLOAT8E4M3FN


@dataclass(frozen=True)
class Standalone:
    """A copy's folder, and Polygraphy's commands for a shell in it."""

    folder: Path
    compare: str  # the copy, on ONNX Runtime, with the reference
    record: str  # every value of the copy
    merge: str  # the record, with the inputs, into what any part of the copy may read
    reduce: str  # the model, as it is by then, to the node at which it leaves the record

    @property
    def script(self) -> str:
        """All of it, as a user reads and runs it."""
        lines = (
            f"cd {shlex.quote(str(self.folder))}",
            "# the copy against the reference:",
            self.compare,
            "# all its values; then where an edited model.onnx, or another runner than the last",
            "# --onnxrt, goes another way: at the last node of reduced.onnx",
            self.record,
            self.merge,
            self.reduce,
        )
        return "\n".join(lines)


def write_standalone(
    build: Path,
    graph: GraphName,
    layer: int | None = None,
    out: Path | None = None,
    case: str | None = None,
) -> Standalone:
    """Write the folder, by default BUILD/standalone/<graph>_<layer>, in place of an earlier one.

    The golden is `case`, or the first by name. Raises BuildError, and then nothing is written.
    """
    spec = BuildSpec.load(build)
    golden = _golden(build, spec, graph, layer, case)
    weights = graph_weights(build, spec, spec.graphs[graph], golden)
    inputs, outputs = golden_inputs(golden), _expected(spec, graph, golden)
    model = _frozen(build, spec, graph, inputs | outputs)
    name = graph if layer is None else f"{graph}_{layer:03d}"
    out = out or build / "standalone" / name
    if out.exists() and not out.is_dir():
        raise BuildError(f"{out}: expected a folder, got a file; name another with --out")
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=".standalone_") as temporary:
        folder = Path(temporary)
        _write_weights(folder / WEIGHTS, weights, spec.file_metadata(f"standalone {name}"))
        model = embed_weights(model, WEIGHTS, _spans(folder / WEIGHTS, weights))
        (folder / MODEL).write_bytes(model.SerializeToString(deterministic=True))
        _write_json(folder, inputs, outputs)
        out.mkdir(exist_ok=True)
        (out / MODEL).unlink(missing_ok=True)  # so that no model ever lies with another's weights
        for file in (WEIGHTS, INPUTS, OUTPUTS, MODEL):
            (folder / file).replace(out / file)
    # Parity's; at fp32 the one of the largest error, which serves for the RMS as well.
    limit = limit_for(spec.precision, next(iter(outputs)), free=graph in ("dense", "moe"))
    return _commands(out, model, limit.value)


def _golden(
    build: Path, spec: BuildSpec, graph: GraphName, layer: int | None, case: str | None
) -> TensorFile:
    if graph == "head" and layer is not None:
        raise BuildError("head: belongs to no layer; leave --layer out")
    labels: dict[str, str] = {"graph": graph}
    if graph != "head":
        labels["layer"] = str(_fitting_layer(spec, graph, layer))
    goldens = {c.path.stem: c for c in graph_cases(build, spec)}
    fitting = sorted(n for n, c in goldens.items() if labels.items() <= c.metadata.items())
    what = ", layer ".join(labels.values())
    if not fitting:
        raise BuildError(f"{build}: no golden of {what}; there are {', '.join(sorted(goldens))}")
    if case is not None and case not in fitting:
        raise BuildError(f"case {case}: no golden of {what}; there are {', '.join(fitting)}")
    return goldens[case or fitting[0]]


def _fitting_layer(spec: BuildSpec, graph: GraphName, layer: int | None) -> int:
    kind = "dense" if graph == "dense" else "moe"
    layers = range(spec.config.num_hidden_layers)
    fitting = [n for n in layers if spec.config.block_type(n) == kind]
    if not fitting:
        raise BuildError(f"{graph}: this model has no {kind} layer")
    if layer not in fitting:
        got = "none" if layer is None else layer
        raise BuildError(f"{graph}: expected --layer {fitting[0]} to {fitting[-1]}, got {got}")
    return layer


def _expected(spec: BuildSpec, graph: GraphName, golden: TensorFile) -> dict[str, Array]:
    outputs = {t.name: golden[f"output.{t.name}"] for t in spec.graphs[graph].outputs}
    if graph == "moe":
        order = np.argsort(outputs["experts"], axis=1)
        for name in ("experts", "expert_weights"):
            outputs[name] = np.take_along_axis(outputs[name], order, axis=1)
    return outputs


def _frozen(
    build: Path, spec: BuildSpec, graph: GraphName, arrays: Mapping[str, Array]
) -> onnx.ModelProto:
    """The graph for the shapes of these inputs and outputs, its weights still inputs."""
    model = widen(onnx.load_from_string(spec.onnx_bytes(build, graph)))
    if graph == "moe":
        model = sort_experts(model)
    return freeze(model, {name: array.shape for name, array in arrays.items()})


def _write_weights(path: Path, weights: Mapping[str, Array], metadata: Mapping[str, str]) -> None:
    """bf16 as fp32, a piece at a time."""
    shapes = {n: (_plain(a[:0]).dtype, a.shape) for n, a in weights.items()}
    with TensorWriter(path, shapes, metadata) as writer:
        for name, array in weights.items():
            rows = max(1, PIECE * len(array) // array.nbytes)
            starts = range(0, len(array), rows)
            writer.write(name, (_plain(array[start : start + rows]) for start in starts))


def _plain(array: Array) -> Array:
    """bf16 as fp32."""
    return array.astype(np.float32) if array.dtype == DTYPES["bfloat16"][1] else array


def _spans(file: Path, names: Iterable[str]) -> dict[str, Span]:
    header, start = read_header(file)
    offsets = {name: header[name]["data_offsets"] for name in names}
    return {name: (start + begin, end - begin) for name, (begin, end) in offsets.items()}


def _write_json(folder: Path, inputs: dict[str, Array], outputs: dict[str, Array]) -> None:
    # Imported here, since its first import fixes Polygraphy's flavour of TensorRT for the process,
    # and the processes in which `compile` builds import all that this command line does.
    from polygraphy.comparator import RunResults
    from polygraphy.json import to_json

    results = RunResults()
    results.add([{n: _plain(a) for n, a in outputs.items()}], runner_name="reference")
    feed = {n: _plain(a) for n, a in inputs.items()}
    (folder / INPUTS).write_text(to_json([feed]), encoding="ascii")
    (folder / OUTPUTS).write_text(results.to_json(), encoding="ascii")


def _commands(folder: Path, model: onnx.ModelProto, limit: float) -> Standalone:
    runner = "--onnxrt --graph-optimization-level ORT_ENABLE_BASIC"
    snr = f"--compare snr --snr-threshold {-20 * math.log10(limit):.0f}"
    run = f"polygraphy run {MODEL} {runner} --load-inputs {INPUTS}"
    left_out = f"--onnx-exclude-outputs {shlex.join(names)} " if (names := _unread(model)) else ""
    return Standalone(
        folder,
        compare=f"{run} --load-outputs {OUTPUTS} {snr}",
        record=f"{run} --onnx-outputs '*' {left_out}--save-outputs {LAYERS}",
        merge=f"polygraphy data merge {INPUTS} {LAYERS} -o {LAYER_INPUTS}",
        reduce=f"polygraphy debug reduce {MODEL} -o reduced.onnx --load-inputs {LAYER_INPUTS} "
        f"--fail-regex 'SNR: .* FAILED' --check polygraphy run polygraphy_debug.onnx {runner} "
        f"--load-inputs {LAYER_INPUTS} --load-outputs {LAYERS} {snr}",
    )


def _unread(model: onnx.ModelProto) -> list[str]:
    """Names, some as patterns, of values that Polygraphy cannot read, or that are mere weights."""
    graph, names = model.graph, set[str]()
    types = {value.name: value.type.tensor_type.elem_type for value in graph.value_info}
    computed = {value.name for value in graph.input}
    for node in graph.node:
        if computed.isdisjoint(node.input):
            names |= set(node.output)
        else:
            computed |= set(node.output)
            names |= {n for n in node.output if types.get(n) in (_BF16, _FP8)}
    return sorted({re.sub(r"__\d+$", "__*", name) for name in names})
