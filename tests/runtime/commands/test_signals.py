"""SIGINT and SIGTERM: while loading and while generating, at the first and at the second."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from runtime.commands.signals import SIGNALS, Interruption, without_traceback
from tests.support.builds import NANO, Build

PROMPT = "And it came to pass"
LONG = ("--max-new-tokens", "4000", "--threads", "1")  # takes half a minute
WITHIN = 30  # seconds, of what takes one


def kill(number: signal.Signals) -> None:
    os.kill(os.getpid(), number)


def handlers() -> list[object]:
    return [signal.getsignal(number) for number in SIGNALS]


@pytest.fixture(autouse=True)
def _usual_handlers() -> Iterator[None]:
    """As a process has them that ignores neither, whatever this one is told."""
    usual = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}
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


@contextmanager
def started(*command: str | Path) -> Iterator[subprocess.Popen[str]]:
    """A process that hears SIGINT even where this one does not, as in a shell's background."""
    process = subprocess.Popen(
        [sys.executable, *map(str, command)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=NANO.parent.parent,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def generating(build: Path, *arguments: str | Path) -> tuple[str | Path, ...]:
    return ("-m", "runtime", "generate", build, *arguments)


def ended(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    """Exit status, and what was left on standard output and error."""
    out, err = process.communicate(timeout=WITHIN)
    return process.returncode, out, err


PLANTED = """
import time
from runtime.__main__ import main
from runtime.backends.onnxruntime import OnnxRuntimeBackend
from runtime.step.chain import Chain

def hang(*arguments):
    print("hanging", flush=True)
    while True:  # awake: of two signals at once another thread may get the second
        time.sleep(0.01)

{plant}
main()
"""


def hanging(plant: str, build: Path, *arguments: str | Path) -> tuple[str | Path, ...]:
    """The command line, hanging where `plant` puts it."""
    return ("-c", PLANTED.format(plant=plant), *generating(build, *arguments)[2:])


@pytest.mark.parametrize("number", SIGNALS)
def test_while_loading(nano: Build, tmp_path: Path, number: signal.Signals) -> None:
    given = ("--prompt", PROMPT, "--out", tmp_path / "out.jsonl")
    plant = "OnnxRuntimeBackend.load_weights = hang"
    with started(*hanging(plant, nano("fp32"), *given)) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "hanging\n"
        process.send_signal(number)
        assert ended(process) == (128 + number, "", "interrupted: 0 of 1 finished\n")
    assert list(tmp_path.iterdir()) == []


def test_while_a_text_is_streamed(nano: Build, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    with started(*generating(nano("fp32"), "--prompt", PROMPT, *LONG, "--out", out)) as process:
        assert process.stdout is not None
        begun = process.stdout.read(1)
        process.send_signal(signal.SIGINT)
        status, text, errors = ended(process)
    assert (status, errors) == (130, "interrupted: 0 of 1 finished\n")
    assert begun and text.endswith("\n") and len(text) < 4000
    assert list(tmp_path.iterdir()) == []


def test_what_is_finished_is_printed_and_saved(nano: Build, tmp_path: Path) -> None:
    """The first and the last of three, of which the last waits behind the second to be printed."""
    asked, out = tmp_path / "prompts.jsonl", tmp_path / "out.jsonl"
    lengths = {"first": 3, "long": 4000, "last": 2}
    lines = [{"prompt": PROMPT, "id": i, "max_new_tokens": n} for i, n in lengths.items()]
    asked.write_text("\n".join(map(json.dumps, lines)))
    arguments = ("--prompts", asked, "--threads", "1", "--json", "--out", out)
    with started(*generating(nano("fp32"), *arguments)) as process:
        assert process.stdout is not None
        first = process.stdout.readline()
        process.send_signal(signal.SIGTERM)
        status, rest, errors = ended(process)
    assert (status, errors) == (143, "interrupted: 2 of 3 finished\n")
    printed = [json.loads(line) for line in (first, *rest.splitlines())]
    assert [(r["id"], len(r["tokens"])) for r in printed] == [("first", 3), ("last", 2)]
    assert out.read_text() == first + rest
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out.jsonl", "prompts.jsonl"]


def test_the_second_signal_ends_a_step(nano: Build, tmp_path: Path) -> None:
    """One prompt ends with its prefill; the other one's first decode hangs. Both come at once."""
    asked, out = tmp_path / "prompts.jsonl", tmp_path / "out.jsonl"
    lines = [{"prompt": PROMPT, "max_new_tokens": n} for n in (1, 2)]
    asked.write_text("\n".join(map(json.dumps, lines)))
    plant = "step, Chain.step = Chain.step, lambda *a: step(*a) if len(a[1][0]) > 1 else hang()"
    given = ("--prompts", asked, "--json", "--out", out)
    with started(*hanging(plant, nano("fp32"), *given)) as process:
        assert process.stdout is not None
        first = process.stdout.readline()
        assert process.stdout.readline() == "hanging\n"
        process.send_signal(signal.SIGINT)
        process.send_signal(signal.SIGTERM)
        assert ended(process) == (143, "", "interrupted: 1 of 2 finished\n")
    assert out.read_text() == first and json.loads(first)["id"] == 1
