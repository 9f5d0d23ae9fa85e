"""`generate` on the command line: one prompt and several; and the small model against others."""

import hashlib
import io
import json
import lzma
import os
import pty
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import runtime.__main__ as command_line
from export.checkpoint.open import Checkpoint
from graphs.contract.spec import BuildError
from models.train import bits_per_byte as reference_bits_per_byte
from runtime.backends import BackendError
from runtime.commands.generation.board import BARS, Board
from runtime.commands.generation.jobs import Job
from runtime.commands.generation.results import Results
from runtime.commands.loading import load
from runtime.llm import LLM
from runtime.load import LoadOptions
from runtime.serving.request import Completion, Request
from runtime.step.chain import Chain, StepError
from runtime.step.prefill import prefill
from tests.support.builds import NANO, Build, OpenChain
from tests.support.doubles.tampering import Block, tamper

PROMPT = "And it came to pass"
OTHER = "In the beginning"
ONE_THREAD = ("--threads", "1")


@dataclass
class Done:
    status: int
    out: str
    err: str

    @property
    def objects(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.out.splitlines()]


Command = Callable[..., Done]


@pytest.fixture
def command(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Command]:
    """`python -m runtime …` in this process."""
    before = signal.getsignal(signal.SIGINT)

    def run(*arguments: str | Path) -> Done:
        monkeypatch.setattr(sys, "argv", ["runtime", *map(str, arguments)])
        with pytest.raises(SystemExit) as left:
            command_line.main()
        status = left.value.code or 0
        assert isinstance(status, int)
        return Done(status, *capsys.readouterr())

    yield run
    signal.signal(signal.SIGINT, before)


def test_one_prompt_is_streamed_with_its_rate(nano: Build) -> None:
    command = [sys.executable, "-m", "runtime", "generate", str(nano("fp32")), "--prompt", PROMPT]
    few = ("--max-new-tokens", "5", *ONE_THREAD)
    done = subprocess.run(
        [*command, *few], capture_output=True, text=True, cwd=NANO.parent.parent, check=False
    )
    assert done.returncode == 0 and done.stdout == ", and\n"
    assert done.stderr.startswith("5 tokens in ") and done.stderr.endswith(" tokens/s\n")
    assert done.stderr.count("\n") == 1


def test_an_object_holds_ids_tokens_and_text(nano: Build, command: Command) -> None:
    few = ("--max-new-tokens", "12", "--json", *ONE_THREAD)
    done = command("generate", nano("fp32"), "--prompt", PROMPT, *few)
    assert (done.status, done.err) == (0, "")
    (result,) = done.objects
    assert result["prompt_ids"] == [256, *PROMPT.encode()]
    assert bytes(result["tokens"]).decode() == result["text"] and len(result["tokens"]) == 12
    assert (result["id"], result["finish_reason"], result["error"]) == (1, "length", None)
    ids = ",".join(map(str, result["prompt_ids"]))
    assert command("generate", nano("fp32"), "--prompt-ids", ids, *few).objects == [result]


def test_several_prompts_are_answered_in_their_order(
    nano: Build, command: Command, tmp_path: Path
) -> None:
    """The second is done first, by its own settings."""
    file, out = tmp_path / "prompts.jsonl", tmp_path / "out.jsonl"
    lines = [
        {"prompt": PROMPT, "id": "a"},
        {"prompt": OTHER, "max_new_tokens": 2},
        {"prompt": PROMPT, "temperature": 1, "seed": 5},
        {"prompt": PROMPT, "stop": [" son"]},
    ]
    file.write_text("\n".join(map(json.dumps, lines)))
    few = ("--max-new-tokens", "20", *ONE_THREAD)
    done = command("generate", nano("fp32"), "--prompts", file, *few, "--json", "--out", out)
    assert (done.status, done.err, out.read_text()) == (0, "", done.out)
    first, second, third, fourth = done.objects
    assert [r["id"] for r in done.objects] == ["a", 2, 3, 4]
    assert first["text"] == ", and the son of Jer" and second["text"] == " o"
    assert len(third["tokens"]) == 20 and third["text"] != first["text"]
    assert (fourth["text"], fourth["finish_reason"]) == (", and the", "stop")

    alone = ("--prompt", PROMPT, "--temperature", "1", "--seed", "5", "--json")
    assert command("generate", nano("fp32"), *alone, *few).objects == [third | {"id": 1}]

    texts = [r["text"] for r in (first, second)]
    both = command("generate", nano("fp32"), "--prompt", PROMPT, "--prompt", OTHER, *few)
    assert both.out.startswith(f"[1]\n{texts[0]}\n\n[2]\n{texts[1]}")
    assert both.err.startswith("40 tokens in ")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out.jsonl", "prompts.jsonl"]


def test_options_reach_the_chain(
    nano: Build, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cache of 64 rows takes one of two prompts at a time; both are read from standard input."""
    chains: list[Chain] = []

    def kept(build: Path, options: LoadOptions) -> Chain:
        chains.append(load(build, options))
        return chains[-1]

    monkeypatch.setattr("runtime.commands.generate.load", kept)
    content = b'{"prompt": "a"}\n{"prompt": "b"}\n'
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(content)))
    options = ("--cache", "64", "--context", "256", "--batch", "3", "--chunk", "16", "--verify")
    few = ("--max-new-tokens", "2", *ONE_THREAD)
    done = command("generate", nano("fp32"), "--prompts", "-", "--json", *few, *options)
    assert [len(r["tokens"]) for r in done.objects] == [2, 2], done.err
    (chain,) = chains
    profile = chain.profile
    assert (profile.batch, profile.tokens, profile.context) == (3, 16, 256)
    assert chain.cache.rows.shape[1] == 64 and chain.cache.handles == []


def test_a_prompt_that_fails_leaves_the_others_their_results(
    nano: Build, command: Command, open_chain: OpenChain, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(layer: int, block: Block) -> None:
        if layer == 2 and (block.read("positions")[:, 0] == 22).any():
            raise BackendError("planted")

    chain = open_chain()
    tamper(chain, fail)
    monkeypatch.setattr("runtime.commands.generate.load", lambda *arguments: chain)
    given = ("--prompt", OTHER, "--prompt", PROMPT, "--max-new-tokens", "6")
    done = command("generate", nano("fp32"), *given, "--json")
    assert (done.status, done.err) == (1, "error: --prompt 2: planted\n")
    good, bad = done.objects
    assert (good["text"], good["error"]) == (" of th", None)
    assert (bad["finish_reason"], bad["error"], bad["text"]) == ("error", "planted", ", a")
    done = command("generate", nano("fp32"), *given[2:])
    assert (done.status, done.out) == (1, ", a\n") and "error: --prompt: planted" in done.err


@pytest.mark.parametrize(
    "arguments, expected",
    [
        (
            "--prompt-ids 1 --max-new-tokens 9000 --context 9000",
            "max_position_embeddings: expected at most",
        ),
        (f"--prompt {'x' * 80} --context 64", "context: expected at most 64 tokens, got 208"),
        ("--prompt-ids 1,999", "token 999: "),
        ("--prompt-ids 1,x", "expected whole numbers as 1,2,3"),
        ("--prompt x --temperature -1", "temperature: expected a number from 0"),
        ("--prompt x --top-p 0", "top_p: expected a number above 0"),
        ("--prompts absent.jsonl", "absent.jsonl: no such file"),
        ("--prompt x --out absent/out.jsonl", "--out: expected a file in a folder that exists"),
    ],
)
def test_bad_input_is_one_line_before_anything_is_loaded(
    nano: Build,
    command: Command,
    monkeypatch: pytest.MonkeyPatch,
    arguments: str,
    expected: str,
) -> None:
    monkeypatch.setattr("runtime.commands.generate.load", lambda *arguments: pytest.fail("loaded"))
    done = command("generate", nano("fp32"), *arguments.split())
    assert (done.status, done.out) == (1, "")
    assert done.err.startswith("error: ") and done.err.count("\n") == 1
    assert expected in done.err


@pytest.mark.parametrize(
    "arguments, expected",
    [
        ("generate {build}/onnx --prompt x", "no spec.json"),
        ("parity {build}/absent", "no spec.json"),
        ("evaluate {build} --text {build}/absent.txt", "no such file"),
        ("generate {build} --prompt x --cache 9bananas", "9bananas"),
        ("generate {build} --prompt x --cache 64", "--prompt: "),
    ],
)
def test_bad_builds_and_files_are_one_line(
    nano: Build, command: Command, arguments: str, expected: str
) -> None:
    done = command(*arguments.format(build=nano("fp32")).split())
    assert (done.status, done.out, done.err.count("\n")) == (1, "", 1)
    assert expected in done.err


@pytest.mark.parametrize(
    "arguments, expected",
    [
        ("generate x", "expected exactly one of --prompt, --prompt-ids, --messages and --prompts"),
        ("generate x --prompt a --prompts -", "exactly one of --prompt"),
        ("generate x --prompt a --engines e", "--engines is for --backend tensorrt, got"),
        ("generate x --prompt a --backend tensorrt --chunk 2", "--chunk is for --backend onnx"),
        ("parity x --backend tensorrt --provider cuda", "--provider is for --backend onnxruntime"),
        ("evaluate x --text y --backend tensorrt --threads 0", "--threads is for --backend onnx"),
        ("parity x --backend tensorrt --rounded", "--rounded is for --backend onnxruntime"),
        ("parity x --backend torch", "'torch' is not one of"),
    ],
)
def test_options_that_make_no_sense_together(
    command: Command, arguments: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    done = command(*arguments.split())
    assert done.status == 2
    assert expected in " ".join(done.err.split())


def test_results_go_to_standard_output_while_a_terminal_shows_the_bars(
    nano: Build, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    terminal, inner = pty.openpty()
    with os.fdopen(inner, "w") as error:
        monkeypatch.setattr("sys.stderr", error)
        prompts = ("--prompt", PROMPT, "--prompt", OTHER, "--max-new-tokens", "8", *ONE_THREAD)
        done = command("generate", nano("fp32"), "--json", *prompts)
    shown = b"".join(_read_all(terminal)).decode()
    assert [len(result["tokens"]) for result in done.objects] == [8, 8]
    assert "2 of 2 done, 16 tokens" in shown and "prompt_ids" not in shown


def _read_all(terminal: int) -> Iterator[bytes]:
    """What was written to a terminal that is closed now."""
    while True:
        try:
            yield os.read(terminal, 65536)
        except OSError:
            os.close(terminal)
            return


def jobs(count: int) -> list[Job]:
    return [Job(n, f"line {n}", Request((1,), 10)) for n in range(count)]


def completion(tokens: int) -> Completion:
    return Completion((1,), tuple(range(tokens)), "text", "length")


def test_the_board_shows_all_and_the_first_that_run() -> None:
    results = Results(jobs(20), lambda job, completion: None)
    board = Board(results)
    board.show([(index, index) for index in range(12)])
    total, *bars = board.bar.tasks
    assert (total.completed, total.total) == (0, 20)
    assert total.fields["note"].startswith("0 of 20 done, 66 tokens, ")
    assert [bar.completed for bar in bars] == list(range(BARS))
    results.add(0, completion(10))
    board.show([(index, 5) for index in range(1, 12)])
    total, *bars = board.bar.tasks
    assert total.completed == 1 and total.fields["note"].startswith("1 of 20 done, 65 tokens, ")
    assert [bar.description for bar in bars] == [f"[{n}]" for n in range(1, BARS + 1)]


def test_results_are_shown_in_order_and_saved_whatever_ends_them(tmp_path: Path) -> None:
    shown: list[int | str] = []
    out = tmp_path / "out.jsonl"
    with (
        pytest.raises(RuntimeError, match="planted"),
        Results(jobs(5), lambda job, completion: shown.append(job.id), out) as results,
    ):
        for index, expected in ((3, []), (0, [0]), (4, [0]), (1, [0, 1])):
            results.add(index, completion(2))
            assert shown == expected
        raise RuntimeError("planted")
    assert shown == [0, 1, 3, 4]
    assert [json.loads(line)["id"] for line in out.read_text().splitlines()] == shown


def test_a_file_of_results_is_whole_or_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out.jsonl"
    out.write_text("before\n")
    with Results(jobs(1), print, out):
        pass
    assert out.read_text() == "before\n"

    def replace(path: Path, target: Path) -> None:
        assert path.read_text().endswith("}\n")
        raise OSError("no space")

    monkeypatch.setattr(Path, "replace", replace)
    with (
        pytest.raises(BuildError, match=r"out\.jsonl: not written: no space"),
        Results(jobs(1), print, out) as results,
    ):
        results.add(0, completion(2))
    assert out.read_text() == "before\n" and list(tmp_path.iterdir()) == [out]


@pytest.fixture(scope="module")
def greedy(checkpoint: Checkpoint) -> list[int]:
    """128 tokens of transformers' own model behind PROMPT."""
    from tests.support.helpers import transformers_model

    ids = torch.tensor([[256, *PROMPT.encode()]])
    with torch.no_grad():
        tokens = transformers_model(checkpoint).generate(
            ids, max_new_tokens=128, do_sample=False, eos_token_id=None
        )
    new: list[int] = tokens[0, ids.shape[1] :].tolist()
    return new


def test_128_greedy_tokens_equal_transformers(
    nano: Build, open_chain: OpenChain, greedy: list[int]
) -> None:
    with LLM(nano("fp32"), open_chain()) as llm:
        (result,) = llm.generate([Request((256, *PROMPT.encode()), 128)])
    assert list(result.tokens) == greedy


def test_an_id_beyond_the_vocabulary_is_refused_before_anything_runs(
    chain: Chain, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chain, "step", lambda *arguments: pytest.fail("a step was taken"))
    handle = chain.cache.allocate()
    for token in (258, -1):
        with pytest.raises(StepError, match=f"token {token}: "):
            next(prefill(chain, handle, [1, 2, 3, token], chunk=2))


@pytest.mark.parametrize("size", [8192, pytest.param(65536, marks=pytest.mark.slow)])
def test_the_small_model_beats_xz_and_the_bar(checkpoint: Checkpoint, size: int) -> None:
    """On the reference: at most 2.3 bits per byte, and fewer than xz -9 needs for the text."""
    text = (NANO / "heldout.txt").read_bytes()[:size]
    assert len(text) <= size
    xz = 8 * len(lzma.compress(text, preset=9)) / len(text)
    bits = reference_bits_per_byte(checkpoint.reference(), text)
    assert bits <= 2.3 and bits < xz


def test_the_checkpoint_is_small_and_whole() -> None:
    files = [*NANO.glob("*.json"), *NANO.glob("*.safetensors")]
    assert sum(f.stat().st_size for f in files) <= 8_000_000
    shards = sorted(NANO.glob("*.safetensors"))
    assert len(shards) >= 2
    readme = (NANO.parent / "README.md").read_text()
    for shard in shards:
        assert f"{hashlib.sha256(shard.read_bytes()).hexdigest()}  {shard.name}" in readme
