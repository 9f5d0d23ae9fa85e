"""Engines of the full-size graphs, built without a GPU, and the refusals of `graphs compile`."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import onnx
import pytest
from typer.testing import CliRunner

from export.engine.to_onnx import export_graphs
from graphs.__main__ import app
from graphs.contract.config import load_raw_config
from graphs.contract.manifest import ENGINE_MODES, EngineMode, Manifest, Profile
from graphs.contract.shapes import CompileError, dimension_ranges, input_bounds
from graphs.contract.spec import GRAPHS, BuildError, BuildSpec, GraphName
from graphs.engines import targets
from graphs.engines.activation_budget import excesses
from graphs.engines.compile import compile_build
from graphs.engines.targets import resolve_target
from graphs.engines.tensorrt import TensorRTError, load_tensorrt
from tests.support.builds import NANO
from tests.support.graph_surgery import read_in_3d, replace_graph
from tests.support.shared_builds import shared_graphs

ROOT = Path(__file__).parents[3]
MB = 1_000_000
TARGET = "sm120"
FOLDER = "rtx-sm120-b8t128c4096"

ENGINE_BAR, MEMORY_BAR = 12 * MB, 1000 * MB
ACTIVATION_BARS: dict[EngineMode, dict[GraphName, int]] = {
    "decode": {"dense": 16 * MB, "moe": 16 * MB, "experts": 12 * MB, "head": 12 * MB},
    "prefill": {"dense": 145 * MB, "moe": 145 * MB, "experts": 24 * MB, "head": 16 * MB},
}
BARS_OF_128_HEADS: dict[EngineMode, dict[GraphName, int]] = {
    "decode": ACTIVATION_BARS["decode"] | {"dense": 30 * MB, "moe": 30 * MB},
    "prefill": ACTIVATION_BARS["prefill"] | {"dense": 460 * MB, "moe": 460 * MB},
}


def over_the_bars(
    manifest: Manifest, activation_bars: dict[EngineMode, dict[GraphName, int]] = ACTIVATION_BARS
) -> list[str]:
    over = []
    for graph, engine in manifest.engines.items():
        if engine.bytes >= ENGINE_BAR:
            over.append(f"{graph}: engine of {engine.bytes:,} bytes")
        if engine.peak_resident_bytes >= MEMORY_BAR:
            over.append(f"{graph}: {engine.peak_resident_bytes:,} bytes resident")
        for mode in ENGINE_MODES:
            size = engine.activation_bytes[mode]
            if size is None or size > activation_bars[mode][graph]:
                over.append(f"{graph}: {mode} activation of {size} bytes")
    return over


@pytest.fixture(scope="module")
def small() -> Path:
    """k2-nano's graphs, not to be changed."""
    return shared_graphs(load_raw_config(NANO), "fp8")


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    build = tmp_path_factory.mktemp("k2") / "fp8"
    export_graphs(load_raw_config("k2"), "fp8", build)
    return build


@pytest.fixture(scope="module")
def engines(exported: Path) -> Manifest:
    return compile_build(exported, TARGET)


@pytest.fixture
def build(exported: Path, engines: Manifest, tmp_path: Path) -> Path:
    """A copy of the compiled build folder, to be changed."""
    return Path(shutil.copytree(exported, tmp_path / "fp8"))


def content_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.slow
def test_full_size_engines_keep_the_bars(engines: Manifest) -> None:
    assert set(engines.engines) == set(GRAPHS)
    assert over_the_bars(engines) == []


@pytest.mark.slow
def test_128_heads_and_groups_of_experts_keep_the_bars(tmp_path: Path) -> None:
    export_graphs(load_raw_config("deepseek-v3"), "fp8", tmp_path / "fp8")
    manifest = compile_build(tmp_path / "fp8", TARGET, graphs=["moe"])
    assert list(manifest.engines) == ["moe"]
    assert over_the_bars(manifest, BARS_OF_128_HEADS) == []


@pytest.mark.slow
def test_full_size_engines_keep_the_budget(exported: Path, engines: Manifest) -> None:
    """A decode step has less to spare than the least FP8 matrix of a block takes."""
    least = 7168 * 2112
    for engine in engines.engines.values():
        for mode in ENGINE_MODES:
            activation = engine.activation_bytes[mode]
            assert activation is not None and activation <= engine.budget_bytes[mode]
        activation = engine.activation_bytes["decode"]
        assert activation is not None and engine.budget_bytes["decode"] - activation < least


@pytest.mark.slow
def test_a_graph_that_breaks_a_rule_is_refused(build: Path) -> None:
    """The dense block with one linear layer reading [1, tokens, in] in place of [tokens, in]."""
    plant_a_copy(build)
    before = content_of(build / FOLDER)
    message = (
        r"dense: 2-D linear activations: node\S+ \(FP8Linear3D\): mlp\.down\.weight: "
        r".*132\.1 MB, is copied at every run .*`python -m graphs lint` lists all"
    )
    with pytest.raises(CompileError, match=message):
        compile_build(build, TARGET)
    assert content_of(build / FOLDER) == before
    shutil.rmtree(build / FOLDER)
    with pytest.raises(CompileError, match=message):
        compile_build(build, TARGET, graphs=["dense"])
    assert not (build / FOLDER).exists()


@pytest.mark.slow
def test_a_copied_weight_breaks_the_budget_and_is_named(
    build: Path, engines: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same graph where no rule would refuse it."""
    plant_a_copy(build)
    monkeypatch.setattr("graphs.engines.compile.lint_model", lambda *_: [])
    planted = compile_build(build, TARGET, graphs=["dense"])
    over = over_the_bars(planted)
    assert [text.partition(" activation")[0] for text in over] == [
        "dense: decode",
        "dense: prefill",
    ]
    before = engines.engines["dense"].activation_bytes["decode"]
    after = planted.engines["dense"].activation_bytes["decode"]
    assert before is not None and after is not None
    assert after - before >= 0.97 * 18432 * 7168  # the FP8 matrix, but for scratch that it shares
    spec = BuildSpec.load(build)
    over_budget = excesses(spec, "dense", planted.engines["dense"], planted.profile)
    assert [excess.mode for excess in over_budget] == ["decode", "prefill"]
    for excess in over_budget:
        assert str(excess).endswith("likely copied at every run: mlp.down.weight (132.1 MB)")
    monkeypatch.setattr("graphs.commands.compile.compile_build", lambda *_: planted)
    result = CliRunner().invoke(app, ["compile", str(build), "--target", TARGET])
    assert result.exit_code == 0
    assert [line for line in result.output.splitlines() if "warning" in line] == [
        f"warning: {excess}" for excess in over_budget
    ]
    for graph in ("moe", "experts", "head"):
        assert excesses(spec, graph, planted.engines[graph], planted.profile) == []


def plant_a_copy(build: Path) -> None:
    model = onnx.load(build / "onnx/dense.onnx")
    read_in_3d(model, "mlp.down.weight")
    replace_graph(build, "dense", model.SerializeToString())


@pytest.mark.slow
def test_the_manifest_describes_the_files(exported: Path, engines: Manifest) -> None:
    folder, spec = exported / engines.folder, BuildSpec.load(exported)
    assert folder.name == FOLDER
    assert Manifest.load(folder) == engines
    assert {path.name for path in folder.iterdir()} == {
        "manifest.json",
        *(f"{graph}.engine" for graph in GRAPHS),
    }
    for graph, engine in engines.engines.items():
        content = engines.engine_bytes(folder, graph, spec.graphs[graph].sha256)
        assert len(content) == engine.bytes
        assert set(engine.versions) == {"tensorrt_rtx", "onnx", "polygraphy"}
        assert engine.seconds > 0 and engine.peak_resident_bytes > 50 * MB


@pytest.mark.slow
def test_every_fp8_linear_is_an_fp8_product_of_the_program(engines: Manifest) -> None:
    """Each reads its weight where it is bound, and so do the other linear layers."""
    fp8_layers: dict[GraphName, int] = {"dense": 5, "moe": 5, "experts": 16, "head": 0}
    for graph, count in fp8_layers.items():
        record = engines.engines[graph]
        assert record.not_read == "" and list(record.programs) == list(ENGINE_MODES)
        for program in record.programs.values():
            assert (len(program.fp8_layers), program.fp8_products) == (count, count)
            assert [p for p in program.products if p.is_fp8 and len(p.layers) != 1] == []
            linears = [p for p in program.products if not p.layers[0].startswith("MatMul_")]
            assert [p for p in linears if not p.in_place] == []
            assert program.faults() == []


@pytest.mark.slow
def test_the_head_multiplies_bf16_and_the_gate_fp32(engines: Manifest) -> None:
    """Routing is decided in fp32, and not in TF32."""
    for mode in ENGINE_MODES:
        (head,) = engines.engines["head"].programs[mode].products
        assert (head.layers, head.types) == (("lm_head",), ("bf16", "bf16", "bf16"))
        moe = engines.engines["moe"].programs[mode]
        (gate,) = (p for p in moe.products if p.layers == ("gate",))
        assert gate.types == ("float", "float", "float") and not moe.tf32


@pytest.mark.slow
def test_a_named_graph_is_rebuilt_and_the_others_stay(build: Path, engines: Manifest) -> None:
    before = content_of(build / FOLDER)
    manifest = compile_build(build, TARGET, graphs=["head"])
    after = content_of(build / FOLDER)
    assert list(manifest.engines) == list(GRAPHS)
    for graph in ("dense", "moe", "experts"):
        assert after[f"{graph}.engine"] == before[f"{graph}.engine"]
        assert manifest.engines[graph] == engines.engines[graph]
    assert Manifest.load(build / FOLDER) == manifest


@pytest.mark.slow
def test_entries_that_no_longer_hold_are_dropped(build: Path) -> None:
    """1. The engine's bytes changed. 2. Its ONNX file is another. 3. The engine is gone."""
    with (build / FOLDER / "dense.engine").open("ab") as file:
        file.write(b"\0")
    moe = onnx.load(build / "onnx/moe.onnx")
    moe.doc_string = "changed"
    replace_graph(build, "moe", moe.SerializeToString())
    (build / FOLDER / "experts.engine").unlink()
    manifest = compile_build(build, TARGET, graphs=["head"])
    assert list(manifest.engines) == ["head"]


def end_at_once(*_: object) -> None:
    """Stand in for a builder that aborts."""
    os._exit(7)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["aborted", "refused by TensorRT"])
def test_a_failed_compile_changes_nothing(
    build: Path, case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if case == "aborted":
        monkeypatch.setattr("graphs.engines.processes._build_one", end_at_once)
        message = "(head|dense): the builder's process ended with exit code 7"
    else:
        model = onnx.load(build / "onnx/head.onnx")
        cast = model.graph.node[-1]
        cast.op_type = "Bernoulli"  # of ONNX, and not of TensorRT
        cast.attribute[0].name = "dtype"  # in place of `to`
        replace_graph(build, "head", model.SerializeToString())
        message = r"head: tensorrt_rtx 1\.\S+: .*Bernoulli"
    before = content_of(build / FOLDER)
    with pytest.raises(CompileError, match=message):
        compile_build(build, TARGET, graphs=["head", "dense"])
    assert content_of(build / FOLDER) == before
    shutil.rmtree(build / FOLDER)
    with pytest.raises(CompileError, match=message):
        compile_build(build, TARGET, graphs=["head"])
    assert not (build / FOLDER).exists()


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("sm86", "target: expected sm89 or later for fp8, got sm86"),
        ("sm90", "expected .* with the compiler rtx, got sm90; use the compiler tensorrt"),
        ("sm100", "got sm100; use the compiler tensorrt"),
        ("sm42", "one of sm75, sm80, sm86, sm89, sm120, sm121 with the compiler rtx, got sm42$"),
        ("hopper", "target: expected auto or one of sm75, .*, got 'hopper'"),
        ("120", "target: expected auto or one of sm75, .*, got '120'"),
    ],
)
def test_targets_refused(small: Path, target: str, message: str) -> None:
    with pytest.raises(CompileError, match=message):
        compile_build(small, target)


def test_targets_of_other_precisions() -> None:
    assert resolve_target("sm75", "rtx", "fp32") == 75
    assert resolve_target("sm80", "rtx", "bf16") == 80
    with pytest.raises(CompileError, match="target: expected sm80 or later for bf16, got sm75"):
        resolve_target("sm75", "rtx", "bf16")


@pytest.mark.parametrize(
    ("answer", "capability"),
    [("8.9\n12.0\n", 89), ("12.0\n", 120), ("No devices were found\n", None)],
)
def test_the_gpu_is_the_first_that_the_driver_names(
    answer: str, capability: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert targets._gpu() is None
    driver = tmp_path / "nvidia-smi"
    driver.write_text(f"#!/bin/sh\nprintf '{answer}'\n")
    driver.chmod(0o755)
    assert targets._gpu() == capability


def test_auto_is_the_gpu_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("graphs.engines.targets._gpu", lambda: None)
    assert resolve_target("auto", "rtx", "fp8") == 120
    with pytest.raises(CompileError, match=r"expected a GPU .*, got none; .* use the compiler rtx"):
        resolve_target("auto", "tensorrt", "fp8")
    monkeypatch.setattr("graphs.engines.targets._gpu", lambda: 90)
    assert resolve_target("auto", "tensorrt", "fp8") == 90
    with pytest.raises(CompileError, match="got sm90; use the compiler tensorrt"):
        resolve_target("auto", "rtx", "fp8")
    with pytest.raises(CompileError, match=r"target: expected sm90, .* got sm100"):
        resolve_target("sm100", "tensorrt", "fp8")


@pytest.mark.parametrize(
    ("profile", "graphs", "message"),
    [
        (Profile(tokens=1), GRAPHS, "tokens: expected at least 2, got 1"),
        (Profile(batch=0), GRAPHS, "batch: expected at least 1, got 0"),
        (Profile(), ["attention"], "graph: expected one of dense, moe, .*, got 'attention'"),
    ],
)
def test_requests_refused(
    small: Path, profile: Profile, graphs: list[GraphName], message: str
) -> None:
    with pytest.raises(CompileError, match=message):
        compile_build(small, TARGET, profile, graphs=graphs)


def test_a_build_folder_that_is_not_whole(small: Path, tmp_path: Path) -> None:
    build = Path(shutil.copytree(small, tmp_path / "build"))
    with pytest.raises(BuildError, match=r"no spec\.json"):
        compile_build(tmp_path, TARGET)
    with (build / "onnx/moe.onnx").open("ab") as file:
        file.write(b"\0")
    with pytest.raises(BuildError, match=r"moe\.onnx: expected sha256"):
        compile_build(build, TARGET)
    replace_graph(build, "moe", b"\xff" * 100)
    with pytest.raises(BuildError, match="moe: expected an ONNX file, got other bytes"):
        compile_build(build, TARGET)
    (build / "spec.json").write_text("{}", "utf-8")
    with pytest.raises(BuildError, match="damaged or incomplete"):
        compile_build(build, TARGET)


def test_profiles(small: Path) -> None:
    spec, profile = BuildSpec.load(small), Profile(batch=4, tokens=32, context=512)
    assert profile.name == "b4t32c512"
    decode = input_bounds(spec.graphs["dense"], "decode", profile)
    assert set(decode) == {"x", "positions", "context"}
    assert decode["x"] == ((1, 1, 224), (4, 1, 224), (4, 1, 224))
    assert decode["context"] == ((1, 0, 144), (4, 128, 144), (4, 512, 144))
    prefill = input_bounds(spec.graphs["moe"], "prefill", profile)
    assert prefill["positions"] == ((1, 1), (1, 32), (1, 32))
    experts = input_bounds(spec.graphs["experts"], "prefill", profile)
    assert experts["acc"] == ((1, 224), (32, 224), (32, 224))
    assert experts["rows_7"] == ((1,), (8,), (32,))
    assert input_bounds(spec.graphs["experts"], "decode", profile)["h"][2] == (4, 224)
    assert input_bounds(spec.graphs["head"], "decode", profile)["hidden"][2] == (4, 224)


@pytest.mark.parametrize("mode", ENGINE_MODES)
def test_no_profile_is_fixed_at_one_row(mode: EngineMode) -> None:
    ranges = dimension_ranges(mode, Profile(batch=1, tokens=2, context=1))
    assert ranges["batch"][2] * ranges["tokens"][2] == 2
    assert ranges["rows"] == (1, 2, 2)


def test_importing_graphs_imports_no_compiler() -> None:
    program = (
        "import sys, graphs.engines.compile, graphs.contract.manifest, graphs.engines.tensorrt\n"
        "print([m for m in sys.modules if m.startswith(('tensorrt', 'polygraphy'))])"
    )
    result = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert result.stdout == "[]\n"


def test_one_module_imports_the_compilers() -> None:
    importers = [
        str(path.relative_to(ROOT))
        for package in ("export", "graphs", "runtime")
        for path in (ROOT / package).rglob("*.py")
        if re.search(
            r"^\s*(import|from) (tensorrt|tensorrt_rtx)\b|import_module\(.polygraphy",
            path.read_text("utf-8"),
            re.MULTILINE,
        )
    ]
    assert importers == ["graphs/engines/tensorrt.py"]


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorrt", None)
    with pytest.raises(TensorRTError, match=r"tensorrt: .*pip install '\.\[tensorrt\]'"):
        load_tensorrt("tensorrt")
    monkeypatch.setitem(sys.modules, "tensorrt_rtx", None)
    with pytest.raises(TensorRTError, match=r"tensorrt_rtx: .*pip install '\.\[compile\]'"):
        load_tensorrt("rtx")


@pytest.mark.slow
def test_an_error_is_one_line_and_exit_code_1(tmp_path: Path) -> None:
    result = subprocess.run(
        [sys.executable, "-m", "graphs", "compile", str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 1
    assert result.stdout == ""
    assert result.stderr.startswith("error: ") and "no spec.json" in result.stderr
    assert result.stderr.count("\n") == 1
