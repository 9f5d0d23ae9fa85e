"""spec.json: what is saved comes back, and what does not fit is refused."""

import dataclasses
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from graphs.contract.config import ModelConfig
from graphs.contract.spec import (
    GRAPHS,
    BuildError,
    BuildSpec,
    GraphSpec,
    TapSpec,
    TensorSpec,
    config_hash,
)
from tests.support.helpers import tiny_config

RAW = tiny_config()
TAPS = (
    TapSpec("c_q", "c^Q", "linear", (), ("BS", "Q"), "BSQ", (0, 136)),
    TapSpec("scores", "scores", "o", ("s_0", "s_1"), ("B", "T", "H", "S"), "BHST"),
)


@pytest.fixture
def build(tmp_path: Path) -> Path:
    """A build folder whose graphs are a few bytes."""
    (tmp_path / "onnx").mkdir()
    graphs = {}
    for name in GRAPHS:
        file, content = f"onnx/{name}.onnx", f"bytes of {name}".encode()
        (tmp_path / file).write_bytes(content)
        inputs = TensorSpec("x", "float", ("batch", 160)), TensorSpec("w", "int64", (3,), "weight")
        outputs = (TensorSpec("y", "bfloat16", ("tokens*batch", 160)),)
        sha256 = hashlib.sha256(content).hexdigest()
        graphs[name] = GraphSpec(name, file, sha256, inputs, outputs, TAPS)
    BuildSpec("fp8", RAW, config_hash(RAW), graphs).save(tmp_path)
    return tmp_path


def test_shapes_follow_the_sizes_of_dynamic_dimensions() -> None:
    tensor = TensorSpec("h", "float", ("tokens*batch", 160))
    assert tensor.shape({"tokens": 3, "batch": 2}) == (6, 160)
    assert TensorSpec("x", "float", ("batch", "tokens", 4)).shape({"tokens": 3, "batch": 2}) == (
        2,
        3,
        4,
    )


def test_the_spec_comes_back_as_it_was_saved(build: Path) -> None:
    spec = BuildSpec.load(build)
    assert (spec.raw_config, spec.precision, spec.slots) == (RAW, "fp8", 8)
    assert spec.config == ModelConfig.from_dict(RAW)
    assert spec.graphs["moe"].weights == (TensorSpec("w", "int64", (3,), "weight"),)
    assert spec.graphs["moe"].taps == TAPS
    assert spec.onnx_bytes(build, "moe") == b"bytes of moe"
    saved = (build / "spec.json").read_bytes()
    spec.save(build)
    assert BuildSpec.load(build) == spec and (build / "spec.json").read_bytes() == saved
    assert {path.name for path in build.iterdir()} == {"spec.json", "onnx"}
    with pytest.raises(dataclasses.FrozenInstanceError):
        spec.precision = "bf16"  # type: ignore[misc]


def test_the_cache_is_of_the_activations_type(build: Path) -> None:
    spec = BuildSpec.load(build)
    types = {p: dataclasses.replace(spec, precision=p).cache_dtype for p in ("fp32", "bf16", "fp8")}
    assert types == {"fp32": "float", "bf16": "bfloat16", "fp8": "bfloat16"}


def test_a_configs_hash_is_of_its_content() -> None:
    assert config_hash(dict(reversed(RAW.items()))) == config_hash(RAW)
    assert config_hash(RAW | {"hidden_size": 96}) != config_hash(RAW)


def test_an_absent_spec_is_an_error_that_says_how_to_make_it(tmp_path: Path) -> None:
    with pytest.raises(BuildError, match=r"no spec.json; export again with `python"):
        BuildSpec.load(tmp_path)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"{}", b"\xff\xfe", b'{"format": 4}'])
def test_a_damaged_spec_is_refused(build: Path, content: bytes) -> None:
    (build / "spec.json").write_bytes(content)
    with pytest.raises(BuildError, match=r"spec.json: damaged or incomplete .*; export again"):
        BuildSpec.load(build)


Raw = dict[str, Any]
CHANGES: dict[str, tuple[Callable[[Raw], object], str]] = {
    "another format": (lambda raw: raw.update(format=99), "expected format 4, got 99"),
    "another config": (
        lambda raw: raw["raw_config"].update(hidden_size=96),
        "config_sha256 does not match its config",
    ),
    "an unknown precision": (
        lambda raw: raw.update(precision="fp4"),
        "damaged or incomplete .*got 'fp4'",
    ),
    "a graph less": (lambda raw: raw["graphs"].pop("head"), "graph head is missing"),
    "an unknown field": (lambda raw: raw.update(extra=1), "damaged or incomplete"),
    "graphs in a list": (lambda raw: raw.update(graphs=[]), "damaged or incomplete"),
    "a tensor without dims": (
        lambda raw: raw["graphs"]["head"]["inputs"][0].pop("dims"),
        "damaged or incomplete",
    ),
}


@pytest.mark.parametrize(("change", "message"), CHANGES.values(), ids=CHANGES)
def test_a_changed_spec_is_refused(
    build: Path, change: Callable[[Raw], object], message: str
) -> None:
    path = build / "spec.json"
    raw = json.loads(path.read_text("utf-8"))
    change(raw)
    path.write_text(json.dumps(raw), "utf-8")
    with pytest.raises(BuildError, match=rf"{path}: .*{message}.*export again"):
        BuildSpec.load(build)


def test_a_changed_graph_is_refused(build: Path) -> None:
    spec, path = BuildSpec.load(build), build / "onnx" / "moe.onnx"
    path.write_bytes(path.read_bytes() + b"\0")
    with pytest.raises(BuildError, match=rf"{path}: expected sha256 \w+… from spec.json, got \w+…"):
        spec.onnx_bytes(build, "moe")
    path.unlink()
    with pytest.raises(BuildError, match=f"{path}: missing"):
        spec.onnx_bytes(build, "moe")
