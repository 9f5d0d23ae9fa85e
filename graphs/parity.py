"""Replay each graph's goldens alone, in plain ONNX Runtime on the CPU with no custom library."""

from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from graphs.metrics import Row, compare, compare_routing
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
    """One row per output of every golden. Raises BuildError where the build is incomplete."""
    spec = BuildSpec.load(build)
    rows: list[Row] = []
    sessions = {}
    for golden in graph_cases(build, spec):
        graph = next(g for name, g in spec.graphs.items() if name == golden.metadata["graph"])
        if graph.name not in sessions:
            content = spec.onnx_bytes(build, graph.name)
            sessions[graph.name] = open_session(spec, content, threads)
        inputs = _weights(build, spec, graph, golden) | golden_inputs(golden)
        outputs = _outputs(graph, golden)
        run(sessions[graph.name], inputs, outputs)
        rows += compare_outputs(golden, outputs, spec)
    return rows


def golden_inputs(golden: TensorFile) -> dict[str, Array]:
    """What the golden's graph reads, weights and tables apart."""
    prefix = "input."
    return {n.removeprefix(prefix): a for n, a in golden.tensors.items() if n.startswith(prefix)}


def compare_outputs(golden: TensorFile, outputs: dict[str, Array], spec: BuildSpec) -> list[Row]:
    """Rows for the outputs of one graph; routing is compared as sets."""
    case = golden.path.stem
    rows = []
    for name, array in outputs.items():
        if name not in ("experts", "expert_weights"):
            rows.append(compare(case, name, array, golden[f"output.{name}"], spec.precision))
    if "experts" in outputs:
        routing, _ = routing_rows(golden, outputs["experts"], outputs["expert_weights"], spec)
        rows += routing
    return rows


def routing_rows(
    golden: TensorFile, experts: Array, weights: Array, spec: BuildSpec
) -> tuple[list[Row], Array]:
    """`compare_routing` against a MoE golden."""
    return compare_routing(
        golden.path.stem,
        (experts, weights),
        (golden["output.experts"], golden["output.expert_weights"]),
        golden["tap.gate_scores"] + golden["bias"],
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
        table.add_row(row.case, row.tensor, *errors, verdict, row.remark)
    console = Console()
    (console if console.is_terminal else Console(width=120)).print(table)
    return all(row.passed for row in rows)
