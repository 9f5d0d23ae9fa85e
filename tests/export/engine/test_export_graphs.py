"""The exported graphs of k2-nano, against the spec, and the export of the full-size ones."""

import copy
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto
from torch._subclasses.fake_tensor import FakeTensorMode

from export.engine import to_onnx
from export.engine.layers import LinearForm
from export.engine.to_onnx import RECIPES
from export.reference.feedforward import SwiGLU
from graphs.contract.config import ModelConfig, load_raw_config
from graphs.contract.spec import (
    EXPERT_SLOTS,
    GRAPHS,
    BuildError,
    BuildSpec,
    GraphName,
    Precision,
    TensorSpec,
)
from graphs.session import open_session, run
from tests.support.builds import NANO, ROOT
from tests.support.shared_builds import shared_graphs

RAW = load_raw_config(NANO)
CONFIG = ModelConfig.from_dict(RAW)
PRECISIONS: tuple[Precision, ...] = ("fp32", "fp8")
EACH = pytest.mark.parametrize("graph", GRAPHS)
BOTH = pytest.mark.parametrize("precision", PRECISIONS)
MEMORY_BAR = 1_500_000_000  # bytes; the fp8 weights of K2's graphs alone are 1.4 GB in fp32

# Exports the graphs again (all in fp8, one in fp32), and K2's; prints the most memory it had
# resident, in kB.
EXPORT_SCRIPT = """
import json, sys
from pathlib import Path
from export.engine.to_onnx import export_graph, export_graphs
from graphs.contract.config import ModelConfig, load_raw_config
folder, raw = Path(sys.argv[1]), json.loads(sys.argv[2])
model = export_graph(ModelConfig.from_dict(raw), "fp32", "moe")
(folder / "moe.onnx").write_bytes(model.SerializeToString(deterministic=True))
export_graphs(raw, "fp8", folder / "fp8")
export_graphs(load_raw_config("k2"), "fp8", folder / "k2")
status = Path("/proc/self/status").read_text()
print(status.split("VmHWM:")[1].split()[0])
"""


@dataclass(frozen=True)
class ExportProcess:
    """A process that exports into a separate folder."""

    process: subprocess.Popen[str]
    folder: Path


@pytest.fixture(scope="module")
def export_process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ExportProcess]:
    """Running until the tests that need it are done."""
    folder = tmp_path_factory.mktemp("elsewhere")
    with subprocess.Popen(
        [sys.executable, "-c", EXPORT_SCRIPT, str(folder), json.dumps(RAW)],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT), "PYTHONHASHSEED": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        yield ExportProcess(process, folder)
        process.kill()


@pytest.fixture(scope="module")
def builds() -> dict[Precision, Path]:
    """Not to be changed."""
    return {precision: shared_graphs(RAW, precision) for precision in PRECISIONS}


@pytest.fixture(scope="module")
def elsewhere(export_process: ExportProcess) -> tuple[Path, int]:
    """The other process's export folder, and its peak of resident bytes."""
    output, errors = export_process.process.communicate()
    assert export_process.process.returncode == 0, errors[-2000:]
    return export_process.folder, 1024 * int(output.split()[-1])


def load(builds: dict[Precision, Path], precision: Precision, graph: GraphName) -> Any:
    return onnx.load(builds[precision] / "onnx" / f"{graph}.onnx")


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@BOTH
@EACH
def test_graphs_pass_the_strict_checker_and_every_value_is_shaped(
    builds: dict[Precision, Path], precision: Precision, graph: GraphName
) -> None:
    model = load(builds, precision, graph)
    onnx.checker.check_model(model, full_check=True)
    values = (*model.graph.input, *model.graph.output, *model.graph.value_info)
    shaped = {v.name for v in values if v.type.tensor_type.HasField("shape")}
    typed = {v.name for v in values if v.type.tensor_type.elem_type}
    made = {name for node in model.graph.node for name in node.output if name}
    assert made and made <= shaped & typed


@BOTH
@EACH
def test_weights_are_inputs_and_no_initialiser_is_one(
    builds: dict[Precision, Path], precision: Precision, graph: GraphName
) -> None:
    model = load(builds, precision, graph)
    with FakeTensorMode():
        module = RECIPES[graph].module(CONFIG, LinearForm.from_precision(precision))
        parameters = {name: tuple(p.shape) for name, p in module.named_parameters()}
    weights = {t.name: t.dims for t in BuildSpec.load(builds[precision]).graphs[graph].weights}
    assert weights == parameters
    assert weights.keys() <= {value.name for value in model.graph.input}
    assert all(np.prod(tensor.dims) <= 8 for tensor in model.graph.initializer)


def test_weights_are_stored_as_the_engines_read_them(builds: dict[Precision, Path]) -> None:
    """[out, in], FP8 with a scale per output; norms and gate fp32."""
    expected: dict[Precision, dict[str, tuple[str, tuple[int, ...]]]] = {
        "fp8": {
            "attention.qkv_a.weight": ("float8e4m3fn", (176 + 112 + 32, 224)),
            "attention.qkv_a.scale": ("float", (320,)),
            "attention.q_b.weight": ("float8e4m3fn", (4 * 96, 176)),
            "attention.w_uk": ("bfloat16", (4, 64, 112)),
            "attention.w_uv": ("bfloat16", (4, 112, 64)),
            "shared.gate_up.weight": ("float8e4m3fn", (2 * 176, 224)),
            "gate.weight": ("float", (8, 224)),
            "gate.bias": ("float", (8,)),
            "post_norm.weight": ("float", (224,)),
        },
        "fp32": {
            "attention.qkv_a.weight": ("float", (320, 224)),
            "attention.w_uk": ("float", (4, 64, 112)),
            "shared.down.weight": ("float", (224, 176)),
        },
    }
    for precision, tensors in expected.items():
        weights = BuildSpec.load(builds[precision]).graphs["moe"].weights
        stored = {t.name: (t.dtype, t.dims) for t in weights}
        assert {name: stored[name] for name in tensors} == tensors
        assert len(stored) == (18 if precision == "fp8" else 13)


def block_inputs(precision: Precision) -> list[TensorSpec]:
    act = "float" if precision == "fp32" else "bfloat16"
    return [
        TensorSpec("x", "float", ("batch", "tokens", 224)),
        TensorSpec("positions", "int64", ("batch", "tokens")),
        TensorSpec("context", act, ("batch", "context", 144)),
        TensorSpec("cos", "float", (8192, 16), "table"),
        TensorSpec("sin", "float", (8192, 16), "table"),
    ]


@BOTH
def test_inputs_and_outputs_are_as_designed(
    builds: dict[Precision, Path], precision: Precision
) -> None:
    act = "float" if precision == "fp32" else "bfloat16"
    new = TensorSpec("new", act, ("batch", "tokens", 144))
    slots = range(EXPERT_SLOTS)
    expected: dict[GraphName, tuple[list[TensorSpec], list[TensorSpec]]] = {
        "dense": (
            block_inputs(precision),
            [TensorSpec("y", "float", ("batch", "tokens", 224)), new],
        ),
        "moe": (
            block_inputs(precision),
            [
                TensorSpec("acc", "float", ("tokens*batch", 224)),
                TensorSpec("h", act, ("tokens*batch", 224)),
                TensorSpec("experts", "int64", ("tokens*batch", 2)),
                TensorSpec("expert_weights", "float", ("tokens*batch", 2)),
                new,
            ],
        ),
        "experts": (
            [
                TensorSpec("h", act, ("tokens", 224)),
                TensorSpec("acc", "float", ("tokens", 224)),
                *(TensorSpec(f"rows_{i}", "int64", (f"rows_{i}",)) for i in slots),
                *(TensorSpec(f"gates_{i}", "float", (f"rows_{i}", 1)) for i in slots),
            ],
            [TensorSpec("acc_out", "float", ("tokens", 224))],
        ),
        "head": (
            [TensorSpec("hidden", "float", ("rows", 224))],
            [TensorSpec("logits", "float", ("rows", 258))],
        ),
    }
    for name, graph in BuildSpec.load(builds[precision]).graphs.items():
        activations = [t for t in graph.inputs if t.kind != "weight"]
        assert (activations, list(graph.outputs)) == expected[name]


@BOTH
@EACH
def test_the_spec_says_what_the_graph_says(
    builds: dict[Precision, Path], precision: Precision, graph: GraphName
) -> None:
    spec, model = BuildSpec.load(builds[precision]), load(builds, precision, graph)
    for values, tensors in (
        (model.graph.input, spec.graphs[graph].inputs),
        (model.graph.output, spec.graphs[graph].outputs),
    ):
        declared = [
            (
                v.name,
                TensorProto.DataType.Name(v.type.tensor_type.elem_type).lower(),
                tuple(d.dim_param or d.dim_value for d in v.type.tensor_type.shape.dim),
            )
            for v in values
        ]
        assert [(t.name, t.dtype, t.dims) for t in tensors] == declared


# Custom nodes of a graph: op → how many in fp32, and how many FP8Linear fp8 adds.
OPS: dict[GraphName, tuple[dict[str, int], int]] = {
    "dense": ({"RoPE": 2, "LatentAttention": 1}, 5),
    "moe": ({"RoPE": 2, "LatentAttention": 1, "TopKGate": 1}, 5),
    "experts": ({}, 2 * EXPERT_SLOTS),
    "head": ({}, 0),
}


@BOTH
@EACH
def test_custom_ops_are_nodes_with_a_body(
    builds: dict[Precision, Path], precision: Precision, graph: GraphName
) -> None:
    model, (expected, fp8) = load(builds, precision, graph), copy.deepcopy(OPS[graph])
    if precision == "fp8" and fp8:
        expected["FP8Linear"] = fp8
    custom = [node.op_type for node in model.graph.node if node.domain == "kimi"]
    assert {op: custom.count(op) for op in custom} == expected
    assert [(f.domain, f.name) for f in model.functions] == [
        ("kimi", op) for op in sorted(expected)
    ]
    assert {n.domain for n in model.graph.node} <= {"", "kimi"}
    assert {(o.domain, o.version) for o in model.opset_import} <= {("", 24), ("kimi", 1)}
    for function in model.functions:
        assert [(o.domain, o.version) for o in function.opset_import] == [("", 24)]


@BOTH
@EACH
def test_files_hold_no_path_and_no_stack_trace(
    builds: dict[Precision, Path], precision: Precision, graph: GraphName
) -> None:
    content = (builds[precision] / "onnx" / f"{graph}.onnx").read_bytes()
    for trace in (
        str(ROOT),
        str(builds[precision]),
        "site-packages",
        ".py",
        "stack_trace",
        "File ",
    ):
        assert trace.encode() not in content
    model = onnx.load_from_string(content)
    for proto in (model, model.graph, *model.graph.node, *model.functions):
        assert not proto.doc_string and not proto.metadata_props


def test_an_idle_slot_adds_nothing_whatever_it_computes(builds: dict[Precision, Path]) -> None:
    """Case 17: one row with gate 0, here with weights of NaN; the other slots' rows are added."""
    torch.manual_seed(0)
    M, D, F = 5, 224, 176
    experts = [SwiGLU(D, F).requires_grad_(False) for _ in range(2)]
    h, acc = torch.randn(M, D), torch.randn(M, D)
    inputs = {"h": h, "acc": acc}
    expected = acc.clone()
    for slot in range(EXPERT_SLOTS):
        rows, gates = torch.tensor([0]), torch.zeros(1, 1)
        gate_up, down = torch.full((2 * F, D), torch.nan), torch.full((D, F), torch.nan)
        if slot < 2:
            rows, gates, expert = torch.tensor([3, slot]), torch.rand(2, 1), experts[slot]
            gate_up = torch.cat([expert.gate_proj.weight, expert.up_proj.weight])
            down = expert.down_proj.weight
            expected[rows] += expert(h[rows]) * gates
        inputs |= {f"rows_{slot}": rows, f"gates_{slot}": gates}
        inputs |= {f"slots.{slot}.gate_up.weight": gate_up, f"slots.{slot}.down.weight": down}
    spec, summed = BuildSpec.load(builds["fp32"]), np.zeros((M, D), np.float32)
    session = open_session(spec, spec.onnx_bytes(builds["fp32"], "experts"), 1)
    run(session, {name: t.numpy() for name, t in inputs.items()}, {"acc_out": summed})
    torch.testing.assert_close(torch.from_numpy(summed), expected, rtol=0, atol=1e-5)
    assert np.array_equal(summed[[2, 4]], acc[[2, 4]].numpy())


@pytest.fixture
def copied_build(
    builds: dict[Precision, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Path:
    """A build of fp32, where an export takes the graphs of the one that was copied."""
    monkeypatch.setattr(
        to_onnx,
        "export_graph",
        lambda _config, _precision, graph: onnx.load(builds["fp32"] / "onnx" / f"{graph}.onnx"),
    )
    return Path(shutil.copytree(builds["fp32"], tmp_path / "copy"))


def test_a_build_of_an_older_format_is_exported_again(copied_build: Path) -> None:
    before, path = contents(copied_build), copied_build / "spec.json"
    older = json.loads(path.read_text()) | {"format": 1}
    path.write_text(json.dumps(older))
    with pytest.raises(BuildError, match=r"spec.json: expected format \d, got 1; export again"):
        BuildSpec.load(copied_build)
    to_onnx.export_graphs(RAW, "fp32", copied_build)
    assert contents(copied_build) == before


@pytest.mark.parametrize(
    ("raw", "precision", "message"),
    [
        (
            RAW,
            "fp8",
            r"copy: expected a build of precision fp8 .*, got one of fp32 .*another --out",
        ),
        (RAW | {"vocab_size": 320}, "fp32", r"copy: expected .*config .*another --out"),
    ],
    ids=["precision", "config"],
)
def test_another_build_is_left_alone(
    copied_build: Path, raw: dict[str, Any], precision: Precision, message: str
) -> None:
    before = contents(copied_build)
    with pytest.raises(BuildError, match=message):
        to_onnx.export_graphs(raw, precision, copied_build)
    assert contents(copied_build) == before


@pytest.mark.parametrize("text", ["", "[]", "{}"])
def test_a_damaged_spec_is_not_replaced(copied_build: Path, text: str) -> None:
    path = copied_build / "spec.json"
    path.write_text(text)
    with pytest.raises(BuildError, match=r"spec.json: damaged .*remove it and export again"):
        to_onnx.export_graphs(RAW, "fp32", copied_build)
    assert path.read_text() == text


@pytest.mark.slow
def test_two_exports_give_the_same_bytes(
    builds: dict[Precision, Path], elsewhere: tuple[Path, int]
) -> None:
    """The other export has another process, folder and hash seed."""
    here, there = contents(builds["fp8"]), contents(elsewhere[0] / "fp8")
    assert set(here) == {"spec.json", *(f"onnx/{graph}.onnx" for graph in GRAPHS)}
    assert here == there
    fp32 = builds["fp32"] / "onnx" / "moe.onnx"
    assert fp32.read_bytes() == (elsewhere[0] / "moe.onnx").read_bytes()


@pytest.mark.slow
def test_full_size_graphs_are_exported_in_little_memory(elsewhere: tuple[Path, int]) -> None:
    folder, peak = elsewhere
    spec = BuildSpec.load(folder / "k2")
    assert spec.config.hidden_size == 7168
    assert sum(len(spec.onnx_bytes(folder / "k2", graph)) for graph in GRAPHS) < 1_000_000
    assert peak < MEMORY_BAR, f"{peak:,} bytes resident"
