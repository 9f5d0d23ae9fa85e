"""The table of `make gpu-check`, made without one; and what happens without a GPU."""

import hashlib
import json
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import onnx
import pytest
from typer.testing import CliRunner

from bench import gpu_check
from graphs.contract.manifest import Compiler, EngineRecord, Manifest, Profile
from graphs.contract.program import Program
from graphs.contract.spec import BuildSpec
from graphs.engines.program import LinearLayers
from runtime.backends import BackendError
from runtime.devices.base import DeviceError
from runtime.devices.cuda import CudaDevice
from runtime.devices.weights import Weights
from runtime.step.chain import Chain
from tests.support.builds import PROFILE, Build, OpenBackend

GPU: Any = SimpleNamespace(sm=120, name="double")


@pytest.fixture
def opened(
    monkeypatch: pytest.MonkeyPatch, nano: Build, onnxruntime_backend: OpenBackend
) -> list[Any]:
    """The options with which builds were opened: all on ONNX Runtime here."""
    spec = BuildSpec.load(nano("fp32"))
    weights = Weights.open(nano("fp32"), spec)
    found: list[Any] = []

    def load_chain(build: Any, **options: Any) -> Any:
        found.append(options)
        return Chain(spec, weights, onnxruntime_backend("fp32", PROFILE), PROFILE, 1024)

    monkeypatch.setattr(gpu_check, "load_chain", load_chain)
    compiled = SimpleNamespace(folder="engines")
    monkeypatch.setattr(gpu_check, "compile_build", lambda *arguments: compiled)
    return found


def test_parity_runs_on_both_backends_of_a_gpu(nano: Build, opened: list[Any]) -> None:
    rows = list(gpu_check.parity(nano("fp32"), GPU))
    assert [row.what for row in rows] == [
        "parity, fp32, TensorRT (rtx)",
        "parity, fp32, ONNX Runtime",
    ]
    assert all(row.passed > 40 and not row.failed and not row.remark for row in rows)
    assert [options.get("provider") for options in opened] == [None, "cuda"]
    assert opened[0]["engines"] == nano("fp32") / "engines"


def manifest_of(build: Path, compiler: Compiler, record: dict[str, Any]) -> Manifest:
    """The dense engine alone, its file a few bytes."""
    folder = build / f"{compiler}-sm120-{Profile().name}"
    folder.mkdir()
    (folder / "dense.engine").write_bytes(b"engine")
    sha256 = BuildSpec.load(build).graphs["dense"].sha256
    digest = hashlib.sha256(b"engine").hexdigest()
    plain = EngineRecord("dense.engine", digest, 6, sha256, {}, {}, {}, {}, None, {}, "", 0.0, 0)
    return Manifest(compiler, "sm120", Profile(), {"dense": replace(plain, **record)})


@pytest.fixture
def fp8_build(nano: Build, tmp_path: Path) -> Path:
    return Path(shutil.copytree(nano("fp8"), tmp_path / "fp8"))


def test_fp8_products_of_programs_that_were_read(fp8_build: Path) -> None:
    program = Program({}, (), (), 1, 0, tf32=False)
    manifest = manifest_of(fp8_build, "rtx", {"programs": {"decode": program}})
    row = gpu_check.fp8_products(fp8_build, manifest)
    assert (row.what, row.passed, row.failed, row.remark) == ("FP8 products (rtx)", 5, 0, "")


def test_a_program_that_was_not_read_is_no_pass(fp8_build: Path) -> None:
    manifest = manifest_of(fp8_build, "rtx", {"not_read": "not read: tensorrt_rtx 9.9"})
    row = gpu_check.fp8_products(fp8_build, manifest)
    assert (row.passed, row.failed) == (0, 5)
    assert row.remark == "first: attention.qkv_a: not read: tensorrt_rtx 9.9"


@pytest.mark.parametrize("key", ["Datatype", "Format/Datatype"])
@pytest.mark.parametrize(
    ("activation", "remark"),
    [
        ("FP8", ""),
        ("BF16", "first: dense: attention.o: expected FP8 × FP8, got BF16 × FP8 × FP32"),
        (None, "first: dense: attention.o: expected a layer with its node, got none"),
    ],
)
def test_engines_of_tensorrt_are_inspected(
    fp8_build: Path, monkeypatch: pytest.MonkeyPatch, key: str, activation: str | None, remark: str
) -> None:
    model = onnx.load(fp8_build / "onnx" / "dense.onnx")
    layers = LinearLayers.from_model(model)
    inspected: list[dict[str, Any]] = []
    for node, weight in layers.weights.items():
        types = [activation if weight == "attention.o.weight" else "FP8", "FP8", "FP32"]
        if types[0]:
            inputs = [{"Name": "x", key: name} for name in types]
            nodes = f"[ONNX Layer: {node}]\x1f[ONNX Layer: DequantizeLinear_1]"
            inspected.append({"LayerType": "gemm", "Metadata": nodes, "Inputs": inputs})
    inspected.append({"LayerType": "kgen", "Metadata": None, "Inputs": None})
    monkeypatch.setattr(gpu_check, "load_tensorrt", lambda _: InspectedTensorRT(inspected))
    row = gpu_check.fp8_products(fp8_build, manifest_of(fp8_build, "tensorrt", {}))
    assert (row.failed, row.passed) == (bool(remark), 5 - bool(remark))
    assert (row.what, row.remark) == ("FP8 products (tensorrt)", remark)


class InspectedTensorRT:
    """TensorRT's module, whose engine has these layers."""

    Logger: Any = MagicMock()
    LayerInformationFormat = SimpleNamespace(JSON="json")

    def __init__(self, layers: list[dict[str, Any]]) -> None:
        self.layers = layers
        self.Runtime = lambda _: self

    def deserialize_cuda_engine(self, content: bytes) -> "InspectedTensorRT":
        assert content == b"engine"
        return self

    def create_engine_inspector(self) -> "InspectedTensorRT":
        return self

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    def get_layer_information(self, index: int, form: str) -> str:
        assert form == "json"
        return json.dumps(self.layers[index])


def test_what_fails_is_a_row_of_its_own(nano: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: Any, **options: Any) -> None:
        raise BackendError("planted\nover two lines")

    monkeypatch.setattr(gpu_check, "load_chain", refuse)
    monkeypatch.setattr(gpu_check, "compile_build", refuse)
    rows = list(gpu_check.parity(nano("fp32"), GPU))
    assert [(row.failed, row.remark) for row in rows] == [(1, "planted over two lines")] * 2


def test_a_precision_that_the_gpu_has_not_is_skipped(nano: Build) -> None:
    old: Any = SimpleNamespace(sm=75, name="double")
    (row,) = gpu_check.parity(nano("fp8"), old)
    assert (row.skipped, row.remark) == (1, "fp8 needs sm89, this is sm75")


def test_without_a_gpu_it_is_one_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent() -> None:
        raise DeviceError("no GPU")

    monkeypatch.setattr(CudaDevice, "open", absent)
    done = CliRunner().invoke(gpu_check.app, ["build"])
    assert isinstance(done.exception, DeviceError)


@pytest.mark.parametrize(("failed", "status"), [(0, 0), (1, 1)])
def test_the_status_says_whether_all_passed(
    monkeypatch: pytest.MonkeyPatch, failed: int, status: int
) -> None:
    monkeypatch.setattr(CudaDevice, "open", lambda: GPU)
    monkeypatch.setattr(gpu_check, "tests", lambda: gpu_check.CheckRow("tests", 5, 0, 0, 1.0))
    row = gpu_check.CheckRow("parity, fp8", 7, failed, 0, 1.0)
    monkeypatch.setattr(gpu_check, "parity", lambda build, gpu: [row])
    done = CliRunner().invoke(gpu_check.app, ["build"])
    assert done.exit_code == status and "parity, fp8" in done.output
