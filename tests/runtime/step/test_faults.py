"""Faults planted one at a time: what is hit, what is not, and that a retry is right."""

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from graphs.contract.spec import BuildError, BuildSpec, layer_file
from runtime.backends import BackendError
from runtime.cache.errors import NonFiniteError
from runtime.devices import weights as weights_module
from runtime.devices.weights import Weights
from runtime.serving.request import Request
from runtime.serving.scheduler import Scheduler
from runtime.step.chain import Chain, LogitsError
from tests.support.builds import Build, OpenChain
from tests.support.doubles.tampering import Block, restore, tamper
from tests.support.requests import REQUESTS, prompt, run, run_alone

LAYER = 2  # in the middle of the chain


def expect_contained(chain: Chain, error: type[Exception], what: str) -> None:
    """Of three requests the third ends with the error, the others are right, and so is a retry."""
    results = run(chain, REQUESTS)
    assert isinstance(results[2].error, error) and what in str(results[2].error)
    assert [result.reason for result in results] == ["length", "length", "error"]
    restore(chain)
    expected = [tuple(run_alone(chain, request).tokens) for request in REQUESTS]
    assert [result.tokens for result in results[:2]] == expected[:2]
    assert run(chain, REQUESTS[2:])[0].tokens == expected[2]


def fail_at(position: int) -> Callable[[int, Block], None]:
    """Runs in which a sequence stands at this position fail, in the middle of the chain."""

    def fail(layer: int, block: Block) -> None:
        if layer == LAYER and (block.read("positions")[:, 0] == position).any():
            raise BackendError("planted")

    return fail


@pytest.mark.parametrize("position", [0, 47], ids=["prefill", "decode"])
def test_a_run_that_fails_ends_the_request_that_it_fails_for(
    open_chain: OpenChain, position: int
) -> None:
    """In prefill, of the third prompt; in decode, of three sequences together."""
    chain = open_chain(cache=1024)
    prefills = 0

    def fail(layer: int, block: Block) -> None:
        nonlocal prefills
        prefills += layer == LAYER and block.read("positions").shape[1] > 2
        if position or prefills == 3:
            fail_at(position)(layer, block)

    tamper(chain, fail)
    expect_contained(chain, BackendError, "planted")


def test_a_group_that_fails_once_is_run_again_one_by_one(
    open_chain: OpenChain, caplog: pytest.LogCaptureFixture
) -> None:
    chain = open_chain(cache=1024)
    expected = [tuple(run_alone(chain, request).tokens) for request in REQUESTS]
    failed: list[int] = []

    def fail(layer: int, block: Block) -> None:
        if layer == LAYER and len(block.read("positions")) == 3 and not failed:
            failed.append(layer)
            raise BackendError("planted")

    tamper(chain, fail)
    results = run(chain, REQUESTS)
    assert [result.tokens for result in results] == expected and failed
    assert "3 sequences failed together, now each alone: planted" in caplog.text


def test_when_every_run_fails_every_request_says_so(open_chain: OpenChain) -> None:
    chain = open_chain(cache=1024)

    def fail(layer: int, block: Block) -> None:
        raise BackendError("planted")

    tamper(chain, fail)
    results = run(chain, REQUESTS)
    assert all(isinstance(result.error, BackendError) for result in results)
    restore(chain)
    expected = [tuple(run_alone(chain, request).tokens) for request in REQUESTS]
    assert [result.tokens for result in run(chain, REQUESTS)] == expected


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_row_that_is_not_finite_ends_its_own_request(open_chain: OpenChain, value: float) -> None:
    chain = open_chain(cache=1024)

    def poison(layer: int, block: Block) -> None:
        positions = block.read("positions")[:, 0]
        if layer == LAYER and (positions == 47).any():
            block.poison("new", (positions == 47, 0, 7), value)

    tamper(chain, poison)
    expect_contained(chain, NonFiniteError, f"layer {LAYER}, sequence 3")


def test_logits_that_are_not_finite_end_their_own_request(open_chain: OpenChain) -> None:
    """Behind the last block, where no cache row shows it."""
    chain = open_chain(cache=1024)

    def poison(layer: int, block: Block) -> None:
        positions = block.read("positions")[:, 0]
        if layer == chain.config.num_hidden_layers - 1 and (positions == 47).any():
            block.poison("acc", (positions == 47, 3))

    tamper(chain, poison)
    expect_contained(chain, LogitsError, "sequence 3: logits hold NaN")


def test_nan_behind_a_shorter_sequence_reaches_no_other(open_chain: OpenChain) -> None:
    """Case 18: the new row of every padded sequence is NaN, in every block.

    The second prompt takes three steps, in which its slot is padding between two that decode.
    """
    chain = open_chain(cache=2048)
    requests = [REQUESTS[0], Request(prompt(0, 300), 2), REQUESTS[1]]
    expected = [tuple(run_alone(chain, request).tokens) for request in requests]
    poisoned: list[int] = []

    def poison(layer: int, block: Block) -> None:
        positions = block.read("positions")
        B, S = positions.shape
        if S == 1 and B > 1:
            paused = (positions[:, 0] > 64) & (positions[:, 0] < 300)  # within the second prompt
            for b in np.flatnonzero(paused):
                block.poison("new", int(b))
                poisoned.append(B)

    tamper(chain, poison)
    assert [result.tokens for result in run(chain, requests)] == expected
    assert 3 in poisoned


@pytest.mark.parametrize("error", [MemoryError("planted"), RuntimeError("planted")])
def test_memory_that_runs_out_in_a_step_is_contained_and_a_bug_is_not(
    open_chain: OpenChain, error: Exception
) -> None:
    chain = open_chain(cache=1024)

    def fail(layer: int, block: Block) -> None:
        if layer == LAYER and (block.read("positions")[:, 0] == 47).any():
            raise error

    tamper(chain, fail)
    if isinstance(error, MemoryError):
        expect_contained(chain, MemoryError, "planted")
        return
    scheduler = Scheduler(chain)
    for request in REQUESTS:
        scheduler.submit(request)
    with pytest.raises(RuntimeError, match="planted"):
        scheduler.run()
    scheduler.close()
    chain.cache.check()
    assert chain.cache.handles == [] and not scheduler.busy


@pytest.fixture
def copy(nano: Build, tmp_path: Path) -> Path:
    """A build of its own, to be damaged."""
    return shutil.copytree(nano("fp32"), tmp_path / "build")


def flip(path: Path, offset: int) -> None:
    content = bytearray(path.read_bytes())
    content[offset] ^= 1
    path.write_bytes(content)


def test_a_weight_file_that_is_cut_short_is_refused(copy: Path) -> None:
    path = copy / layer_file(2)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(BuildError, match=r"layer_002.*not a complete safetensors file"):
        Weights.open(copy, BuildSpec.load(copy))


def test_a_weight_file_of_another_layer_is_refused(copy: Path) -> None:
    shutil.copy(copy / layer_file(1), copy / layer_file(2))
    with pytest.raises(BuildError, match=r"content: expected 'layer 2', got 'layer 1'"):
        Weights.open(copy, BuildSpec.load(copy))


def test_a_weight_file_of_another_build_is_refused(nano: Build, copy: Path) -> None:
    shutil.copy(nano("fp8") / layer_file(2), copy / layer_file(2))
    with pytest.raises(BuildError, match=r"precision: expected 'fp32', got 'fp8'"):
        Weights.open(copy, BuildSpec.load(copy))


def test_a_bit_that_flipped_is_found_in_small_files_always_and_in_all_when_asked(
    copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = copy / layer_file(2)
    flip(path, path.stat().st_size - 100)
    spec = BuildSpec.load(copy)
    with pytest.raises(BuildError, match=r"layer_002.*expected sha256 .* from its header, got"):
        Weights.open(copy, spec)
    monkeypatch.setattr(weights_module, "VERIFIED_BELOW", 0)
    Weights.open(copy, spec)
    with pytest.raises(BuildError, match=r"layer_002.*sha256"):
        Weights.open(copy, spec, verify=True)


def test_refusing_a_build_changes_nothing_on_disk(copy: Path) -> None:
    path = copy / layer_file(2)
    flip(path, path.stat().st_size - 100)
    before = {p: p.read_bytes() for p in copy.rglob("*") if p.is_file()}
    with pytest.raises(BuildError):
        Weights.open(copy, BuildSpec.load(copy))
    assert {p: p.read_bytes() for p in copy.rglob("*") if p.is_file()} == before
