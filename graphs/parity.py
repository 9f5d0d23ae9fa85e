"""Replay each graph's goldens alone, in plain ONNX Runtime on the CPU with no custom library."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from rich.console import Console
from rich.table import Table

from graphs.metrics import Groups, Row, compare, compare_routing
from graphs.passes.feed_linears import feed_linears
from graphs.session import open_session, run
from graphs.spec import (
    HEAD_FILE,
    ROPE_FILE,
    BuildError,
    BuildSpec,
    GraphSpec,
    expert_weight,
    layer_file,
)
from graphs.tensorfile import DTYPES, Array, TensorFile


def graph_cases(build: Path, spec: BuildSpec) -> list[TensorFile]:
    """The goldens of single graphs. Raises BuildError where there are none."""
    files = sorted((build / "golden").glob("*.safetensors"))
    cases = [TensorFile.open(p, spec.file_metadata(p.stem)) for p in files]
    cases = [c for c in cases if c.metadata["graph"] in spec.graphs]
    if not cases:
        raise BuildError(f"{build}: no goldens; make them with `python -m export golden`")
    return cases


def graph_parity(build: Path, threads: int = 0) -> list[Row]:
    """One row per output of every golden. Raises BuildError where the build is incomplete.

    At fp8 a block runs twice: freely, and with its linear layers fed the reference's own inputs,
    where what each would have read is a row as well.
    """
    spec = BuildSpec.load(build)
    rows: list[Row] = []
    graphs: dict[str, _Graph] = {}
    for golden in graph_cases(build, spec):
        name = next(name for name in spec.graphs if name == golden.metadata["graph"])
        if name not in graphs:
            graphs[name] = _Graph.open(build, spec, spec.graphs[name], threads)
        rows += graphs[name].compare(golden)
    return rows


# Of each FP8 linear layer of a block, what the reference recorded of its input.
LINEAR_INPUTS = {
    "attention.qkv_a": "x_attn",
    "attention.qkv": "x_attn",
    "attention.q_b": "c_q_normed",
    "attention.o": "mix",
    "mlp.gate_up": "h",
    "mlp.down": "product",
    "shared.gate_up": "h",
    "shared.down": "shared_product",
}


def linear_input(golden: TensorFile, module: str) -> Array:
    """A linear layer's input in the reference, fp32 [M, K]."""
    tap = golden[f"tap.{LINEAR_INPUTS[module]}"]
    if module == "attention.o":  # [B,H,S,V]
        tap = tap.transpose(0, 2, 1, 3)
        tap = tap.reshape(*tap.shape[:2], -1)
    return np.ascontiguousarray(tap.reshape(-1, tap.shape[-1]))


@dataclass(frozen=True)
class _Graph:
    """One graph's session; at fp8, a block's second one and the modules that are fed in it."""

    build: Path
    spec: BuildSpec
    graph: GraphSpec
    session: Any
    fed_session: Any
    fed: tuple[str, ...]

    @classmethod
    def open(cls, build: Path, spec: BuildSpec, graph: GraphSpec, threads: int) -> "_Graph":
        content = spec.onnx_bytes(build, graph.name)
        session = open_session(spec, content, threads)
        fed_session, fed = None, tuple[str, ...]()
        if spec.precision == "fp8" and graph.name in ("dense", "moe"):
            model, fed = feed_linears(onnx.load_from_string(content))
            fed_session = open_session(spec, model.SerializeToString(), threads)
        return cls(build, spec, graph, session, fed_session, fed)

    def compare(self, golden: TensorFile) -> list[Row]:
        inputs = _weights(self.build, self.spec, self.graph, golden) | golden_inputs(golden)
        outputs = _outputs(self.graph, golden)
        run(self.session, inputs, outputs)
        if not self.fed:
            return compare_outputs(golden, outputs, self.spec)
        rows = compare_outputs(golden, outputs, self.spec, free=True)
        expected = {module: linear_input(golden, module) for module in self.fed}
        inputs |= {f"fed.{module}": array for module, array in expected.items()}
        outputs = _outputs(self.graph, golden)
        computed = {m: np.full_like(array, np.nan) for m, array in expected.items()}
        run(self.fed_session, inputs, outputs | {f"computed.{m}": a for m, a in computed.items()})
        case = f"{golden.path.stem}, fed"
        for module, array in computed.items():
            tensor = f"{module}'s input"
            rows.append(compare(case, tensor, array, expected[module], self.spec.precision))
        return rows + compare_outputs(golden, outputs, self.spec, case)


def golden_inputs(golden: TensorFile) -> dict[str, Array]:
    """What the golden's graph reads, weights and tables apart."""
    prefix = "input."
    return {n.removeprefix(prefix): a for n, a in golden.tensors.items() if n.startswith(prefix)}


def compare_outputs(
    golden: TensorFile,
    outputs: dict[str, Array],
    spec: BuildSpec,
    case: str | None = None,
    free: bool = False,
) -> list[Row]:
    """Rows for the outputs of one graph; routing is compared as sets.

    `free`: whether an fp8 block ran on its own activations all along.
    """
    case = case or golden.path.stem
    rows = []
    for name, array in outputs.items():
        if name not in ("experts", "expert_weights"):
            expected = golden[f"output.{name}"]
            rows.append(compare(case, name, array, expected, spec.precision, free=free))
    if "experts" in outputs:
        routing, _ = routing_rows(golden, outputs["experts"], outputs["expert_weights"], spec, case)
        rows += routing
    return rows


def routing_rows(
    golden: TensorFile, experts: Array, weights: Array, spec: BuildSpec, case: str | None = None
) -> tuple[list[Row], Array]:
    """`compare_routing` against a MoE golden."""
    c = spec.config
    return compare_routing(
        case or golden.path.stem,
        (experts, weights),
        (golden["output.experts"], golden["output.expert_weights"]),
        golden["tap.gate_scores"] + (golden["bias"] if c.has_gate_bias else 0),
        Groups(c.n_group, c.topk_group, c.group_score or "max"),
        spec.precision,
    )


def _weights(
    build: Path, spec: BuildSpec, graph: GraphSpec, golden: TensorFile
) -> dict[str, Array]:
    if graph.name == "head":
        file = TensorFile.open(build / HEAD_FILE, spec.file_metadata("head"))
        return {t.name: file[t.name] for t in graph.weights}
    layer = int(golden.metadata["layer"])
    file = TensorFile.open(build / layer_file(layer), spec.file_metadata(f"layer {layer}"))
    if graph.name == "experts":
        names = {}
        for weight in graph.weights:
            slot = int(weight.name.split(".")[1])
            names[weight.name] = expert_weight(weight.name, int(golden["slot_experts"][slot]))
        return {name: file[source] for name, source in names.items()}
    tables = TensorFile.open(build / ROPE_FILE, spec.file_metadata("rope"))
    return {t.name: file[t.name] for t in graph.weights} | tables.tensors


def _outputs(graph: GraphSpec, golden: TensorFile) -> dict[str, Array]:
    """Arrays of the right type for a graph's outputs, filled with NaN or −1."""
    outputs = {}
    for t in graph.outputs:
        dtype = DTYPES[t.dtype][1]
        fill = -1 if t.dtype == "int64" else np.nan
        outputs[t.name] = np.full(golden[f"output.{t.name}"].shape, fill, dtype=dtype)
    return outputs


def print_parity(title: str, rows: list[Row]) -> bool:
    """Print the table; returns whether every row is within its limit."""
    table = Table(title=title)
    for column in ("case", "tensor", "max|a−b|/max|b|", "relative RMS", "limit", "", "remark"):
        table.add_column(
            column, justify="left" if column in ("case", "tensor", "remark") else "right"
        )
    for row in rows:
        verdict = "ok" if row.passed else "[bold red]FAIL[/]"
        errors = (f"{row.max_error:.1e}", f"{row.rms_error:.1e}", f"{row.limit:.0e}")
        if not row.compared:
            verdict, errors = "not run", ("", "", "")
        table.add_row(row.case, row.tensor, *errors, verdict, row.remark)
    console = Console()
    (console if console.is_terminal else Console(width=120)).print(table)
    return all(row.passed for row in rows)
