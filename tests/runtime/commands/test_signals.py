"""SIGINT and SIGTERM: while loading and while generating, at the first and at the second."""

import itertools
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from runtime.__main__ import app
from runtime.backends.onnxruntime import OnnxRuntimeBackend
from runtime.commands.signals import SIGNALS, Interruption, without_traceback
from runtime.step.chain import Chain
from tests.support.builds import ROOT, Build

PROMPT = "And it came to pass"
WITHIN = 30  # seconds, of what takes one


def kill(number: signal.Signals) -> None:
    os.kill(os.getpid(), number)


def handlers() -> list[object]:
    return [signal.getsignal(number) for number in SIGNALS]


@pytest.fixture(autouse=True)
def _usual_handlers() -> Iterator[None]:
    """As a process has them that ignores neither, whatever this one is told."""
    usual: dict[signal.Signals, Any] = {
        signal.SIGINT: signal.default_int_handler,
        signal.SIGTERM: signal.SIG_DFL,
    }
    before = {number: signal.signal(number, handler) for number, handler in usual.items()}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_ends_the_block_at_once(number: signal.Signals) -> None:
    """And a further one the process, as the system does it."""
    with Interruption() as interruption:
        try:
            kill(number)
            pytest.fail("the block went on")
        except Exception as e:
            pytest.fail(f"it was taken for an error: {e!r}")
    assert interruption.received == number and interruption.status == 128 + number
    assert handlers() == [signal.SIG_DFL, signal.SIG_DFL]


def test_the_second_ends_a_patient_block() -> None:
    with Interruption() as interruption:
        interruption.patient = True
        assert interruption.received is None
        kill(signal.SIGINT)
        assert interruption.received == signal.SIGINT
        kill(signal.SIGTERM)
        pytest.fail("the block went on")
    assert interruption.status == 143


def test_what_else_ends_a_block_goes_on_and_nothing_is_changed() -> None:
    before = handlers()
    with pytest.raises(ValueError, match="planted"), Interruption():
        raise ValueError("planted")
    assert handlers() == before


def test_an_inner_block_has_its_own_signals() -> None:
    with Interruption() as outer:
        with Interruption() as inner:
            pass
        kill(signal.SIGINT)
    assert outer.received and not inner.received
    with Interruption() as outer, Interruption() as inner:
        kill(signal.SIGTERM)
    assert inner.received and not outer.received


def test_signals_that_were_ignored_stay_ignored() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with Interruption() as interruption:
        kill(signal.SIGINT)
    without_traceback()
    assert interruption.received is None
    assert handlers()[0] == signal.SIG_IGN


def test_without_traceback() -> None:
    without_traceback()
    assert handlers() == [signal.SIG_DFL, signal.SIG_DFL]


def generate(build: Path, *arguments: str | Path) -> Result:
    """`python -m runtime generate` in this process."""
    return CliRunner().invoke(app, ["generate", str(build), *map(str, arguments)])


def before_step(monkeypatch: pytest.MonkeyPatch, number: int, act: Callable[[], object]) -> None:
    """Act before the chain's step of this number, counted from 0."""
    step, steps = Chain.step, itertools.count()

    def acting(chain: Chain, *arguments: Any) -> Any:
        if next(steps) == number:
            act()
        return step(chain, *arguments)

    monkeypatch.setattr(Chain, "step", acting)


@pytest.mark.parametrize("number", SIGNALS)
def test_while_loading(
    nano: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    monkeypatch.setattr(OnnxRuntimeBackend, "load_weights", lambda *arguments: kill(number))
    done = generate(nano("fp32"), "--prompt", PROMPT, "--out", tmp_path / "out.jsonl")
    assert (done.exit_code, done.stdout) == (128 + number, "")
    assert done.stderr == "interrupted: 0 of 1 finished\n"
    assert list(tmp_path.iterdir()) == []


def test_while_a_text_is_streamed(nano: Build, tmp_path: Path) -> None:
    """In a process, with a signal from outside."""
    out = tmp_path / "out.jsonl"
    arguments = ("--prompt", PROMPT, "--max-new-tokens", "4000", "--threads", "1", "--out", out)
    with subprocess.Popen(
        [sys.executable, "-m", "runtime", "generate", nano("fp32"), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    ) as process:
        assert process.stdout is not None
        begun = process.stdout.read(1)
        process.send_signal(signal.SIGINT)
        text, errors = process.communicate(timeout=WITHIN)
    assert (process.returncode, errors) == (130, "interrupted: 0 of 1 finished\n")
    assert begun and text.endswith("\n") and len(text) < 4000
    assert list(tmp_path.iterdir()) == []


def test_what_is_finished_is_printed_and_saved(
    nano: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first and the last of three, of which the last waits behind the second to be printed."""
    before_step(monkeypatch, 6, lambda: kill(signal.SIGTERM))
    path, out = tmp_path / "prompts.jsonl", tmp_path / "out.jsonl"
    lengths = {"first": 3, "long": 4000, "last": 2}
    lines = [{"prompt": PROMPT, "id": i, "max_new_tokens": n} for i, n in lengths.items()]
    path.write_text("\n".join(map(json.dumps, lines)))
    done = generate(nano("fp32"), "--prompts", path, "--threads", "1", "--json", "--out", out)
    assert (done.exit_code, done.stderr) == (143, "interrupted: 2 of 3 finished\n")
    printed = [json.loads(line) for line in done.stdout.splitlines()]
    assert [(r["id"], len(r["tokens"])) for r in printed] == [("first", 3), ("last", 2)]
    assert out.read_text() == done.stdout
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out.jsonl", "prompts.jsonl"]


def test_the_second_signal_ends_a_step(
    nano: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One prompt ends with its prefill; two signals come in the other one's first decode."""
    path, out = tmp_path / "prompts.jsonl", tmp_path / "out.jsonl"
    lines = [{"prompt": PROMPT, "max_new_tokens": n} for n in (1, 2)]
    path.write_text("\n".join(map(json.dumps, lines)))

    def kill_twice() -> None:
        kill(signal.SIGINT)
        kill(signal.SIGTERM)
        pytest.fail("the step went on")

    before_step(monkeypatch, 2, kill_twice)
    done = generate(nano("fp32"), "--prompts", path, "--json", "--out", out)
    assert (done.exit_code, done.stderr) == (143, "interrupted: 1 of 2 finished\n")
    assert out.read_text() == done.stdout and json.loads(done.stdout)["id"] == 1
