"""Engines that are not this build's, this GPU's or this TensorRT's are refused before they run."""

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from graphs.contract.manifest import Manifest, Profile
from graphs.contract.spec import BuildError, BuildSpec
from graphs.engines.tensorrt import load_tensorrt
from runtime.backends import BackendError
from runtime.backends.engine import Library
from runtime.backends.engine_folder import find_engines
from runtime.backends.tensorrt import TensorRTBackend
from runtime.devices.cuda import CudaDevice
from tests.support.builds import Build
from tests.support.doubles.cuda import DriverDouble
from tests.support.doubles.tensorrt import (
    EngineDouble,
    TensorIOMode,
    TensorLocation,
    TensorRTDouble,
    write_double_engines,
)

PROFILE = Profile(batch=4, tokens=16, context=256)


class Folder:
    """Engines written for the double, to be changed and opened."""

    def __init__(self, build: Path, into: Path, **engine: Any) -> None:
        self.build, self.spec = build, BuildSpec.load(build)
        self.path = write_double_engines(build, self.spec, PROFILE, into=into, **engine)

    def manifest(self, change: Callable[[dict[str, Any]], None]) -> None:
        path = self.path / "manifest.json"
        content = json.loads(path.read_text())
        change(content)
        path.write_text(json.dumps(content))

    def open(self, spec: BuildSpec | None = None) -> TensorRTBackend:
        double = TensorRTDouble()
        return TensorRTBackend.open(
            self.build, spec or self.spec, self.path, double.device, trt=double
        )


@pytest.fixture
def folder(nano: Build, tmp_path: Path) -> Folder:
    return Folder(nano("fp32"), tmp_path)


def test_engines_of_another_gpu_are_refused(nano: Build, tmp_path: Path) -> None:
    folder = Folder(nano("fp32"), tmp_path, sm=89)
    expected = (
        "expected engines for this GPU, Double RTX 6000, sm120, got sm89; compile them: `python -m "
        "graphs compile BUILD --target sm120`"
    )
    with pytest.raises(BuildError) as e:
        folder.open()
    assert expected in str(e.value)

    def lie(manifest: dict[str, Any]) -> None:
        manifest["target"] = "sm120"

    folder.manifest(lie)
    with pytest.raises(BackendError, match=r"engine dense \(dense.engine\): not loaded: .*sm 89"):
        folder.open()


def test_the_real_runtime_s_reason_is_in_the_error(folder: Folder) -> None:
    record = Manifest.load(folder.path).engines["head"]
    library = Library(load_tensorrt("rtx"))
    expected = r"engine head \(head.engine\): not loaded: .*Serialization assertion"
    with pytest.raises(BackendError, match=expected):
        library.open("head", b"-" * 4096, record)


def test_engines_of_another_version_are_refused(nano: Build, tmp_path: Path) -> None:
    folder = Folder(nano("fp32"), tmp_path, version="1.6.0.5")
    with pytest.raises(
        BuildError,
        match=r"expected an engine built by tensorrt_rtx 1.7.1.116, got one by 1.6.0.5; compile it",
    ):
        folder.open()


def test_engines_of_another_build_are_refused(folder: Folder) -> None:
    dense = dataclasses.replace(folder.spec.graphs["dense"], sha256="0" * 64)
    other = dataclasses.replace(folder.spec, graphs=folder.spec.graphs | {"dense": dense})
    with pytest.raises(BuildError, match=r"made from another dense.onnx \(expected sha256"):
        folder.open(other)


def test_damaged_or_missing_engines_are_refused(folder: Folder) -> None:
    engine = folder.path / "moe.engine"
    content = engine.read_bytes()
    engine.write_bytes(content[:-1])
    with pytest.raises(BuildError, match=r"moe.engine: expected sha256 .* from manifest.json"):
        folder.open()
    engine.unlink()
    with pytest.raises(BuildError, match="no engine for moe; compile it again"):
        folder.open()
    engine.write_bytes(content)
    folder.manifest(lambda manifest: manifest["profile"].update(tokens=32))
    with pytest.raises(
        BuildError,
        match=r"dense.engine: prefill: expected the shapes of profile b4t32c256, got others; c",
    ):
        folder.open()
    (folder.path / "manifest.json").write_bytes(b"\xff\xfe")
    with pytest.raises(BuildError, match=r"manifest.json: damaged or incomplete .*compile again"):
        folder.open()
    (folder.path / "manifest.json").unlink()
    with pytest.raises(BuildError, match=r"no manifest.json; compile again"):
        folder.open()


def changed(spec: BuildSpec, index: int, **change: Any) -> BuildSpec:
    """With another input of the dense graph."""
    graph = spec.graphs["dense"]
    inputs = list(graph.inputs)
    inputs[index] = dataclasses.replace(inputs[index], **change)
    other = dataclasses.replace(graph, inputs=tuple(inputs))
    return dataclasses.replace(spec, graphs=spec.graphs | {"dense": other})


def test_an_engine_that_is_not_what_the_spec_says_is_refused(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [t.name for t in folder.spec.graphs["dense"].inputs]
    cos = names.index("cos")
    changes: list[tuple[dict[str, Any], str]] = [
        ({"name": "sin2"}, "dense.engine: tensors cos, sin2: only in one of engine and spec"),
        (
            {"dtype": "bfloat16"},
            "dense.engine: cos: expected type DataType.BF16, got DataType.FL",
        ),
        ({"dims": (8192, 17)}, r"cos: expected shape \(8192, 17\), got \(8192, 16\); compile"),
    ]
    for change, expected in changes:
        with pytest.raises(BuildError, match=expected):
            folder.open(changed(folder.spec, cos, **change))
    for name, what, expected in [
        ("get_tensor_location", TensorLocation.HOST, "x: expected location TensorLocation.DEVICE"),
        ("get_tensor_mode", TensorIOMode.NONE, "x: expected direction .*INPUT"),
        (
            "get_tensor_profile_shape",
            [[1, 1, 224]] * 3,
            r"decode: x: expected .*\(4, 1, 224\)\), got",
        ),
    ]:
        with monkeypatch.context() as patch:
            patch.setattr(EngineDouble, name, lambda *a, found=what: found)
            with pytest.raises(BuildError, match=expected):
                folder.open()
    init = EngineDouble.__init__

    def one_profile(self: EngineDouble, *arguments: Any) -> None:
        init(self, *arguments)
        self.num_optimization_profiles = 1

    monkeypatch.setattr(EngineDouble, "__init__", one_profile)
    with pytest.raises(BuildError, match="expected 2 profiles, got 1; compile it again"):
        folder.open()


def test_the_engines_for_this_gpu_are_found(nano: Build, tmp_path: Path) -> None:
    build, spec = nano("fp32"), BuildSpec.load(nano("fp32"))
    copy, device = tmp_path / "build", CudaDevice(DriverDouble())
    shutil.copytree(build, copy, ignore=shutil.ignore_patterns("golden", "weights"))
    with pytest.raises(BuildError, match=r"no engines for this GPU, Double RTX 6000; compile them"):
        find_engines(copy, device)
    write_double_engines(copy, spec, PROFILE, sm=89)
    with pytest.raises(BuildError, match=r"RTX 6000, only rtx-sm89-b4t16c256; compile .*sm120"):
        find_engines(copy, device)
    folder = write_double_engines(copy, spec, PROFILE)
    assert find_engines(copy, device) == folder
    write_double_engines(copy, spec, dataclasses.replace(PROFILE, batch=2))
    with pytest.raises(BuildError, match="in rtx-sm120-b2t16c256, rtx-sm120-b4t16c256; name one"):
        find_engines(copy, device)
