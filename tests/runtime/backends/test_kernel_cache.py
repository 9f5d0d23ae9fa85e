"""What TensorRT-RTX compiled, kept from one start to the next, and how it is told to compile."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from graphs.contract.spec import GRAPHS, BuildError
from runtime.backends.engine import RtxOptions
from runtime.backends.kernel_cache import cache_path
from runtime.devices.base import DeviceError
from tests.support.builds import Build
from tests.support.doubles.cuda import DriverDouble
from tests.support.doubles.opened import Opened, run_graph
from tests.support.doubles.tensorrt import (
    CudaGraphStrategy,
    DynamicShapesKernelSpecializationStrategy,
)


@pytest.fixture
def opened(nano: Build, tmp_path: Path) -> Opened:
    return Opened(nano("fp32"), tmp_path)


def reopen(opened: Opened, folder: Path, **options: Any) -> Opened:
    """The same engines on another double, as in another process."""
    return Opened(opened.build, folder, **options)


def test_what_was_compiled_is_kept_for_this_gpu_and_version(opened: Opened, tmp_path: Path) -> None:
    assert opened.double.compiled == list(GRAPHS)  # once an engine, not once a context
    assert not list(tmp_path.rglob("*.cache"))
    opened.backend.close()
    folder = tmp_path / "rtx-sm120-b4t16c256"
    names = {f"{graph}.double-rtx-6000-1.7.1.116.cache" for graph in GRAPHS}
    assert {p.name for p in folder.iterdir()} - {"manifest.json"} - {
        f"{g}.engine" for g in GRAPHS
    } == names
    before = {p: p.stat().st_mtime_ns for p in folder.glob("*.cache")}
    again = reopen(opened, tmp_path)
    assert again.double.compiled == []
    again.backend.close()
    assert before == {p: p.stat().st_mtime_ns for p in folder.glob("*.cache")}
    other = DriverDouble()
    other.name = "Double RTX 7000"
    assert reopen(opened, tmp_path, driver=other).double.compiled == list(GRAPHS)


@pytest.mark.parametrize(
    "content",
    [b"", b"{", json.dumps({"made_by": ["another", "1"], "kernels": ["head"]}).encode()],
    ids=["empty", "damaged", "of another GPU"],
)
def test_a_runtime_cache_that_is_rejected_is_made_again(
    opened: Opened, tmp_path: Path, caplog: pytest.LogCaptureFixture, content: bytes
) -> None:
    opened.backend.close()
    path = cache_path(tmp_path / "rtx-sm120-b4t16c256/head.engine", "Double RTX 6000", "1.7.1.116")
    good = path.read_bytes()
    path.write_bytes(content)
    with caplog.at_level(logging.WARNING, "runtime"):
        again = reopen(opened, tmp_path)
    assert [r.getMessage() for r in caplog.records] == [
        f"{path}: damaged, or of another GPU or version; made again"
    ]
    assert again.double.compiled == ["head"]
    again.backend.close()
    assert path.read_bytes() == good


def test_a_runtime_cache_is_replaced_whole_or_not_at_all(
    opened: Opened,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    opened.backend.close()
    caches = {p: p.read_bytes() for p in tmp_path.rglob("*.cache")}
    again = reopen(opened, tmp_path)
    for context in again.backend.caches:
        context.cache.kernels.add("more")

    def full(path: Path, target: Path) -> None:
        assert path.read_bytes() and target in caches  # whole, before it gets the name
        raise OSError("No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    again.backend.close()
    assert caches == {p: p.read_bytes() for p in tmp_path.rglob("*.cache")}
    assert not list(tmp_path.rglob("*.tmp"))
    assert len(caplog.records) == 4 and "not saved (No space left" in caplog.text
    monkeypatch.undo()
    again.backend.close()
    assert all(b"more" in p.read_bytes() for p in caches)


def test_a_gpu_that_was_lost_does_not_keep_close_from_saving(
    opened: Opened, tmp_path: Path
) -> None:
    opened.double.plant("moe", 1, "lose")
    with pytest.raises(DeviceError, match=r"planted fault.*has lost the GPU"):
        run_graph(opened.backend, "moe", 3, 1, 8)
    opened.backend.close()
    assert len(list(tmp_path.rglob("*.cache"))) == 4


def test_strategies_are_options_of_rtx_alone(nano: Build, tmp_path: Path) -> None:
    double: Any = Opened(nano("fp32"), tmp_path).double
    lazy = DynamicShapesKernelSpecializationStrategy
    config = double.config
    assert config.cuda_graph_strategy is CudaGraphStrategy.DISABLED
    assert config.dynamic_shapes_kernel_specialization_strategy is lazy.NONE
    options = RtxOptions("eager", "whole_graph_capture")
    double = Opened(nano("fp32"), tmp_path, options=options).double
    config = double.config
    assert config.cuda_graph_strategy is CudaGraphStrategy.WHOLE_GRAPH_CAPTURE
    assert config.dynamic_shapes_kernel_specialization_strategy is lazy.EAGER
    with pytest.raises(BuildError, match="engines of tensorrt, which has no RtxOptions"):
        Opened(nano("fp32"), tmp_path, options=options, compiler="tensorrt")
