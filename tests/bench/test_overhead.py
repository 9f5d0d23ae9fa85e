"""What the chain does around the engines in a decode step, counted by calls: a clock would depend
on the machine. `python -m bench.host.overhead` measures the same in microseconds.
"""

import sys
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from bench.host import startup
from bench.host.null_engines import (
    NullBackend,
    OpenBackend,
    null_chain,
    null_onnxruntime,
    null_tensorrt,
)
from bench.host.overhead import CACHED, overheads, step, table, variant
from graphs.contract.manifest import Profile
from graphs.contract.spec import BuildError, BuildSpec
from runtime.step.chain import Chain
from tests.support.builds import Build

PROFILE = Profile()


@pytest.fixture
def spec(nano: Build) -> BuildSpec:
    return BuildSpec.load(nano("fp32"))


def calls(chain: Chain) -> Counter[str]:
    """Of every function, Python's or not, in one step."""
    found: Counter[str] = Counter()

    def count(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call":
            found[frame.f_code.co_name] += 1
        elif event == "c_call":
            found[argument.__name__] += 1

    step(chain)
    sys.setprofile(count)
    try:
        step(chain)
    finally:
        sys.setprofile(None)
    return found


def calls_of_a_layer(
    spec: BuildSpec, kind: str, sequences: int, open_backend: OpenBackend
) -> Counter[str]:
    """What one more layer of a type adds to a step."""
    dense = {"dense": (2, 3), "moe": (2, 2)}[kind]
    models = [
        variant(spec, num_hidden_layers=layers, first_k_dense_replace=count)
        for layers, count in zip((2, 3), dense, strict=True)
    ]
    less, more = (
        calls(null_chain(model, open_backend, PROFILE, sequences, CACHED)) for model in models
    )
    more.subtract(less)
    return more


@pytest.fixture
def backends(tmp_path: Path) -> dict[str, OpenBackend]:
    return {
        "nothing": lambda spec, profile, sequences: NullBackend(),
        "onnxruntime": lambda spec, profile, count: null_onnxruntime(tmp_path, spec, count),
        "tensorrt": lambda spec, profile, sequences: null_tensorrt(spec, profile),
    }


@pytest.mark.parametrize("sequences", [1, 8])
@pytest.mark.parametrize(
    ("by", "kind", "most"),
    [
        ("nothing", "dense", 10),
        ("nothing", "moe", 100),
        ("onnxruntime", "dense", 60),
        ("onnxruntime", "moe", 300),
        ("tensorrt", "dense", 70),
        ("tensorrt", "moe", 450),
    ],
)
def test_a_layer_takes_few_calls_around_its_engine(
    spec: BuildSpec,
    backends: dict[str, OpenBackend],
    by: str,
    kind: str,
    most: int,
    sequences: int,
) -> None:
    """k2-nano's layers; its 8 experts are one run, however many rows choose them."""
    found = calls_of_a_layer(spec, kind, sequences, backends[by]).total()
    assert 0 < found <= most + 8 * (sequences - 1) * (kind == "moe"), found


def test_onnx_runtime_is_told_of_what_changed_only(
    spec: BuildSpec, backends: dict[str, OpenBackend]
) -> None:
    """Of nothing where lengths and choices are those of the last step, and so are the weights."""
    for kind in ("dense", "moe"):
        found = calls_of_a_layer(spec, kind, 1, backends["onnxruntime"])
        assert found["run_with_iobinding"] > 0 == found["bind_input"] + found["bind_output"]


def test_tensorrt_is_told_of_what_changed_only(
    spec: BuildSpec, backends: dict[str, OpenBackend]
) -> None:
    """Of addresses, which cost less than to remember; of shapes where they are others."""
    for kind, addresses in ("dense", 5), ("moe", 8 + 8 * 4 + 3):
        found = calls_of_a_layer(spec, kind, 1, backends["tensorrt"])
        assert found["set_tensor_address"] == addresses and found["set_input_shape"] == 0


def test_a_layer_and_the_rest_make_a_step(
    spec: BuildSpec, backends: dict[str, OpenBackend]
) -> None:
    found = overheads("nothing", backends["nothing"], spec, 1, 3)
    whole, dense, moe, rest = (one.median for one in found)
    assert whole > 0 and rest > 0 and dense + moe > 0
    assert table(found).row_count == 4


@pytest.mark.slow
def test_a_start_is_timed(nano: Build, tmp_path: Path) -> None:
    assert startup.first_token(nano("fp32"), 1) > 0
    with pytest.raises(BuildError, match=r"no spec\.json"):
        startup.first_token(tmp_path, 1)
