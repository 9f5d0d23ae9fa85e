"""Copies of single graphs: Polygraphy runs them, sees what is wrong, and reduces them to where."""

import functools
import json
import math
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto
from polygraphy.json import load_json

from graphs.contract.spec import BuildError, BuildSpec, GraphName, Precision
from graphs.contract.tensorfile import DTYPES, TensorFile, read_header
from graphs.parity.standalone import Standalone, write_standalone
from tests.support.builds import Build

ROOT = Path(__file__).parents[3]
FILES = ["inputs.json", "model.onnx", "outputs.json", "weights.safetensors"]

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def polygraphy(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Runs a command as a shell in a copy's folder would, from this Python's environment.

    Polygraphy imports torch wherever it can, for seconds a run and no use; here it cannot.
    """
    no_torch = tmp_path_factory.mktemp("no_torch")
    (no_torch / "torch.py").write_text("raise ImportError('not in this test')\n")
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    env = os.environ | {"PATH": path, "PYTHONPATH": str(no_torch), "OMP_WAIT_POLICY": "passive"}

    def run(command: str, folder: Path) -> subprocess.CompletedProcess[str]:
        assert command.startswith("polygraphy ")
        return subprocess.run(
            ["sh", "-c", command], cwd=folder, env=env, capture_output=True, text=True, check=False
        )

    return run


@pytest.fixture(scope="module")
def dense(
    nano: Build, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[Precision], Standalone]:
    """The dense block of k2-nano; tests change copies of it only."""

    @functools.cache
    def copy(precision: Precision) -> Standalone:
        folder = tmp_path_factory.mktemp("standalone") / precision
        return write_standalone(nano(precision), "dense", 0, folder)

    return copy


def changed(copy: Standalone, folder: Path) -> Path:
    return Path(shutil.copytree(copy.folder, folder / "changed"))


def snr(reference: Any, found: Any) -> float:
    """Polygraphy's measure, in dB."""
    noise = np.linalg.norm(found.astype(np.float64) - reference)
    return math.inf if noise == 0 else 20 * math.log10(np.linalg.norm(reference) / noise)


@pytest.mark.slow
@pytest.mark.parametrize("precision, threshold", [("fp32", 100), ("fp8", 34)])
def test_polygraphy_passes_the_copy_and_fails_one_weight_that_is_off(
    dense: Callable[[Precision], Standalone],
    polygraphy: Run,
    tmp_path: Path,
    precision: Precision,
    threshold: int,
) -> None:
    copy = dense(precision)
    assert f"--snr-threshold {threshold}" in copy.compare
    done = polygraphy(copy.compare, copy.folder)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "All outputs matched | Outputs: ['y', 'new']" in done.stdout
    folder = changed(copy, tmp_path)
    header, start = read_header(folder / "weights.safetensors")
    entry = header["attention.kv_norm.weight"]
    assert entry["dtype"] == "F32"
    place = start + entry["data_offsets"][0]
    weight = np.memmap(
        folder / "weights.safetensors", np.float32, "r+", place, tuple(entry["shape"])
    )
    weight *= 1.001 if precision == "fp32" else 1.1
    weight.flush()
    done = polygraphy(copy.compare, folder)
    assert done.returncode == 1 and "Mismatched outputs: ['y', 'new']" in done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    "precision, node, fault",
    [("fp32", "Sigmoid", "Tanh"), ("fp8", "Exp", "Abs")],
)
def test_debug_reduce_finds_the_node_of_a_planted_fault(
    dense: Callable[[Precision], Standalone],
    polygraphy: Run,
    tmp_path: Path,
    precision: Precision,
    node: str,
    fault: str,
) -> None:
    copy = dense(precision)
    folder = changed(copy, tmp_path)
    for command in (copy.record, copy.merge):
        done = polygraphy(command, folder)
        assert done.returncode == 0, done.stdout + done.stderr
    model = onnx.load(folder / "model.onnx", load_external_data=False)
    planted = [n for n in model.graph.node if n.op_type == node][-1]
    planted.op_type = fault
    (folder / "model.onnx").write_bytes(model.SerializeToString())
    done = polygraphy(copy.reduce, folder)
    assert done.returncode == 0, done.stdout + done.stderr
    reduced = onnx.load(folder / "reduced.onnx")
    assert reduced.graph.node[-1].name == planted.name
    assert len(reduced.graph.node) <= 3 and len(model.graph.node) >= 60
    check = re.sub(r".* --check (.*) polygraphy_debug.onnx", r"\1 reduced.onnx", copy.reduce)
    done = polygraphy(check, folder)
    assert done.returncode == 1 and re.search(r"SNR: .* FAILED", done.stdout + done.stderr)


@pytest.mark.parametrize(
    "precision, graph, layer, case",
    [
        ("fp8", "dense", 0, "dense_000_decode"),
        ("fp32", "moe", 3, None),  # of which there is a prefill only, on no cached row
        ("fp8", "moe", 1, None),
        ("fp8", "experts", 1, None),
        ("fp8", "head", None, None),
        ("fp32", "experts", 1, None),
    ],
)
def test_every_graph_agrees_with_its_golden(
    nano: Build,
    tmp_path: Path,
    precision: Precision,
    graph: GraphName,
    layer: int | None,
    case: str | None,
) -> None:
    """Also as ONNX Runtime optimises by default, which is how `debug reduce` opens a model."""
    build, out = nano(precision), tmp_path / "copy"
    copy = write_standalone(build, graph, layer, out, case)
    assert sorted(p.name for p in out.iterdir()) == FILES
    inputs, outputs = load_json(str(out / "inputs.json")), load_json(str(out / "outputs.json"))
    session = ort.InferenceSession(out / "model.onnx", providers=["CPUExecutionProvider"])
    names = [o.name for o in session.get_outputs()]
    found = dict(zip(names, session.run(None, dict(inputs[0])), strict=True))
    expected = dict(outputs["reference"][0].items())
    assert (
        set(found) == set(expected) == {t.name for t in BuildSpec.load(build).graphs[graph].outputs}
    )
    assert {a.dtype.name for a in (*expected.values(), *inputs[0].values())} <= {"float32", "int64"}
    threshold = float(copy.compare.rsplit(" ", 1)[1])
    assert all(snr(expected[name], found[name]) >= threshold for name in names)
    for t in BuildSpec.load(build).graphs[graph].outputs:
        if t.dtype == "bfloat16":
            assert (found[t.name].astype(DTYPES[t.dtype][1]) == found[t.name]).all(), "not rounded"


def test_weights_keep_their_values_and_every_value_has_a_shape(nano: Build, tmp_path: Path) -> None:
    build = nano("fp8")
    write_standalone(build, "moe", 2, tmp_path / "copy")
    model = onnx.load(tmp_path / "copy" / "model.onnx", load_external_data=False)
    graph = BuildSpec.load(build).graphs["moe"]
    external = {
        i.name: i for i in model.graph.initializer if i.data_location == TensorProto.EXTERNAL
    }
    assert set(external) == {t.name for t in graph.inputs if t.kind != "activation"}
    packed = TensorFile.open(build / "weights" / "layer_002.safetensors")
    copied = TensorFile.open(tmp_path / "copy" / "weights.safetensors")
    for t in graph.weights:
        wide = "float" if t.dtype == "bfloat16" else t.dtype
        assert TensorProto.DataType.Name(external[t.name].data_type).lower() == wide
        assert copied[t.name].dtype == DTYPES[wide][1]
        assert (copied[t.name] == packed[t.name].astype(copied[t.name].dtype)).all()
    assert {t.dtype for t in graph.weights} == {"float", "bfloat16", "float8e4m3fn"}
    values = {v.name: v for v in (*model.graph.value_info, *model.graph.output)}
    for node in model.graph.node:
        for name in node.output:
            assert all(d.HasField("dim_value") for d in values[name].type.tensor_type.shape.dim)
    assert not {n.op_type for n in model.graph.node} & {"Shape", "Constant"}
    weights = {i.name for i in model.graph.initializer}
    from_weights = [set(n.input) <= weights for n in model.graph.node]
    assert sum(from_weights) == 5 and all(from_weights[:5]), "in the way of a search"
    assert model.graph.node[-1].op_type != "Cast"


def test_a_copy_is_reproducible_and_leaves_other_files_alone(nano: Build, tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    second.mkdir()
    (second / "reduced.onnx").write_bytes(b"of the user")
    (second / "model.onnx").write_bytes(b"of an earlier copy")
    for out in (first, second):
        write_standalone(nano("fp8"), "dense", 0, out)
    assert sorted(p.name for p in second.iterdir()) == sorted([*FILES, "reduced.onnx"])
    assert all((first / f).read_bytes() == (second / f).read_bytes() for f in FILES)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["first", "second"]


@pytest.mark.parametrize(
    "graph, layer, case, expected",
    [
        ("dense", 1, None, "dense: expected --layer 0 to 0, got 1"),
        ("moe", 0, None, "moe: expected --layer 1 to 3, got 0"),
        ("experts", 7, None, "experts: expected --layer 1 to 3, got 7"),
        ("moe", None, None, "expected --layer 1 to 3, got none"),
        ("head", 1, None, "head: belongs to no layer"),
        ("experts", 2, None, "no golden of experts, layer 2; there are .*experts_001"),
        ("moe", 1, "moe_002_prefill", "case moe_002_prefill: .* there are moe_001_chunk"),
    ],
)
def test_what_does_not_fit_is_refused_and_nothing_written(
    nano: Build,
    tmp_path: Path,
    graph: GraphName,
    layer: int | None,
    case: str | None,
    expected: str,
) -> None:
    with pytest.raises(BuildError, match=expected):
        write_standalone(nano("fp8"), graph, layer, tmp_path / "out" / "copy", case)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "missing, expected",
    [("golden", "no goldens"), ("weights", "layer_000.safetensors"), ("rope.safetensors", "rope")],
)
def test_an_incomplete_build_is_refused_and_nothing_written(
    nano: Build, tmp_path: Path, missing: str, expected: str
) -> None:
    build = tmp_path / "build"
    shutil.copytree(nano("fp8"), build, ignore=shutil.ignore_patterns(missing))
    with pytest.raises(BuildError, match=expected):
        write_standalone(build, "dense", 0)
    assert not (build / "standalone").exists()


def run_cli(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "graphs", "standalone", *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_the_command_prints_what_to_run(nano: Build, tmp_path: Path) -> None:
    build = tmp_path / "fp8"
    shutil.copytree(nano("fp8"), build)
    done = run_cli(build, "dense", "--layer", "0")
    assert done.returncode == 0, done.stderr
    folder = build / "standalone" / "dense_000"
    first, *lines = done.stdout.splitlines()
    assert first == f"cd {folder}" and sorted(p.name for p in folder.iterdir()) == FILES
    commands = [line for line in lines if not line.startswith("#")]
    assert [c.split()[1] for c in commands] == ["run", "run", "data", "debug"]
    done = run_cli(build, "moe", "--layer", "0")
    assert done.returncode == 1 and done.stderr.count("\n") == 1
    assert done.stderr.startswith("error: moe: expected --layer 1 to 3")


def test_the_command_line_imports_no_polygraphy() -> None:
    """Or the processes in which `compile` builds, which import it too, could not choose TensorRT's
    flavour any more.
    """
    program = "import json, sys, graphs.commands.compile; print(json.dumps(sorted(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert not [m for m in json.loads(done.stdout) if m.startswith("polygraphy")]
