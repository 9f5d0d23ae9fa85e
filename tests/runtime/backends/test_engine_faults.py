"""Faults of an engine or of the GPU under a running scheduler: what is hit, and what is not."""

from pathlib import Path

import pytest

from graphs.contract.manifest import Profile
from graphs.contract.spec import BuildSpec
from runtime.backends import BackendError
from runtime.cache.errors import NonFiniteError
from runtime.devices.base import DeviceError
from runtime.devices.weights import Weights
from runtime.serving.scheduler import Scheduler
from runtime.step.chain import Chain
from tests.support.builds import Build, OpenBackend
from tests.support.doubles.opened import Opened
from tests.support.requests import REQUESTS, run, run_alone

PROFILE = Profile(batch=4, tokens=64, context=128)

Expected = list[tuple[int, ...]]


@pytest.fixture
def opened(nano: Build, tmp_path: Path) -> Opened:
    return Opened(nano("fp32"), tmp_path, profile=PROFILE)


def new_chain(opened: Opened) -> Chain:
    return Chain(opened.spec, opened.weights, opened.backend, PROFILE, 512)


@pytest.fixture(scope="module")
def expected(nano: Build, double_backend: OpenBackend) -> Expected:
    """The tokens of each request, alone and with no fault."""
    spec = BuildSpec.load(nano("fp32"))
    weights = Weights.open(nano("fp32"), spec)
    chain = Chain(spec, weights, double_backend("fp32", PROFILE), PROFILE, 512)
    return [tuple(run_alone(chain, request).tokens) for request in REQUESTS]


@pytest.mark.parametrize("run_of_three", [1, 2, 3])
def test_experts_that_fail_in_prefill_end_that_request(
    opened: Opened, expected: Expected, run_of_three: int
) -> None:
    """Of the second of three prompts, each run in one step; in each layer."""
    chain = new_chain(opened)
    tokens = len(REQUESTS[1].prompt)
    opened.double.plant("experts", run_of_three, "refuse", size=tokens)
    results = run(chain, REQUESTS)
    assert [result.reason for result in results] == ["length", "error", "length"]
    assert isinstance(results[1].error, BackendError)
    assert f"engine experts, profile prefill: a run of layer {run_of_three} refused" in str(
        results[1].error
    )
    assert [r.tokens for r in results[::2]] == expected[::2]
    assert run(chain, REQUESTS[1:2])[0].tokens == expected[1]  # a retry


@pytest.mark.parametrize("graph", ["dense", "moe", "experts", "head"])
def test_a_decode_step_that_fails_is_run_again_one_by_one(
    opened: Opened, expected: Expected, graph: str
) -> None:
    chain = new_chain(opened)
    opened.double.plant(graph, 2, "refuse", size=3)
    assert [result.tokens for result in run(chain, REQUESTS)] == expected
    assert not opened.double.faults


def test_nan_that_an_engine_writes_ends_its_own_request(opened: Opened, expected: Expected) -> None:
    chain = new_chain(opened)
    opened.double.plant("moe", 5, "new", row=1, size=3)
    results = run(chain, REQUESTS)
    assert [result.reason for result in results] == ["length", "error", "length"]
    assert isinstance(results[1].error, NonFiniteError) and "layer 2" in str(results[1].error)
    assert [r.tokens for r in results[::2]] == expected[::2]
    assert run(chain, REQUESTS[1:2])[0].tokens == expected[1]


def test_a_gpu_that_is_lost_stops_the_run_with_one_clear_error(opened: Opened) -> None:
    chain = new_chain(opened)
    opened.double.plant("moe", 5, "lose", size=3)
    scheduler = Scheduler(chain)
    for request in REQUESTS:
        scheduler.submit(request)
    with pytest.raises(DeviceError, match="start again, this process has lost the GPU"):
        scheduler.run()
    opened.backend.close()
