"""The table of `make gpu-check`, made without one; and what happens without a GPU."""

from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from bench import gpu_check
from graphs.contract.spec import BuildSpec
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
