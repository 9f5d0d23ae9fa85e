"""The command line: text, JSON, errors; and the small model against transformers."""

import hashlib
import json
import lzma
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import NANO, Build
from train import bits_per_byte as reference_bits_per_byte

from export.checkpoint import Checkpoint
from graphs.manifest import Profile
from graphs.scoring import windows
from runtime.chain import Chain, StepError
from runtime.evaluate import bits_per_byte
from runtime.generate import generate, prefill
from runtime.sampling import Sampler
from runtime.tokenizer import Tokenizer, byte_tokenizer

PROMPT = "And it came to pass"


def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "runtime", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, cwd=NANO.parent.parent)


def test_json_output_holds_ids_tokens_and_text(nano: Build) -> None:
    done = run("generate", nano("fp32"), "--prompt", PROMPT, "--max-new-tokens", "12", "--json")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["prompt_ids"] == [256, *PROMPT.encode()]
    assert bytes(result["tokens"]).decode() == result["text"] and len(result["tokens"]) == 12
    ids = ",".join(map(str, result["prompt_ids"]))
    again = run("generate", nano("fp32"), "--prompt-ids", ids, "--max-new-tokens", "12", "--json")
    assert json.loads(again.stdout) == result


def test_streamed_text_and_rate(nano: Build) -> None:
    done = run("generate", nano("fp32"), "--prompt", PROMPT, "--max-new-tokens", "5")
    assert done.returncode == 0 and len(done.stdout.rstrip("\n")) <= 5
    assert "5 tokens in" in done.stderr and "tokens/s" in done.stderr


@pytest.mark.parametrize(
    "arguments, expected",
    [
        (
            [
                "generate",
                "{build}",
                "--prompt-ids",
                "1",
                "--max-new-tokens",
                "9000",
                "--context",
                "9000",
            ],
            "max_position",
        ),
        (["generate", "{build}", "--prompt", "x" * 80, "--context", "64"], "context limit"),
        (["generate", "{build}", "--prompt-ids", "1,999"], "token 999: below vocab_size"),
        (["generate", "{build}", "--prompt-ids", "1,x"], "whole numbers as 1,2,3"),
        (["generate", "{build}", "--prompt", "x", "--temperature", "-1"], "temperature"),
        (["generate", "{build}/onnx", "--prompt", "x"], "no spec.json"),
        (["parity", "{build}/absent"], "no spec.json"),
        (["evaluate", "{build}", "--text", "{build}/absent.txt"], "no such file"),
    ],
)
def test_bad_input_is_one_line_and_exit_status_1(
    nano: Build, arguments: list[str], expected: str
) -> None:
    done = run(*[a.replace("{build}", str(nano("fp32"))) for a in arguments])
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert expected in done.stderr and len(done.stderr.strip().splitlines()) == 1


def test_128_greedy_tokens_equal_transformers(nano: Build, checkpoint: Checkpoint) -> None:
    from helpers import transformers_model

    model = transformers_model(checkpoint)
    ids = [256, *PROMPT.encode()]
    with torch.no_grad():
        expected = model.generate(
            torch.tensor([ids]), max_new_tokens=128, do_sample=False, eos_token_id=None
        )[0, len(ids) :].tolist()
    chain = Chain.load(nano("fp32"), threads=2)
    assert list(generate(chain, ids, 128, Sampler())) == expected


def test_fp8_costs_at_most_half_a_percent_of_bits_per_byte(nano: Build) -> None:
    """On the first 8 KB here; `make evaluate` gives the whole held-out text."""
    text = (NANO / "heldout.txt").read_bytes()[:8192]
    profile = Profile(tokens=512, context=512)
    chains = (Chain.load(nano(p), profile, threads=2) for p in ("fp32", "fp8"))
    fp32, fp8 = (bits_per_byte(c, byte_tokenizer(c.config), text) for c in chains)
    assert fp8 <= fp32 * 1.005


def test_bits_per_byte_of_tokens_that_are_not_bytes(chain: Chain, checkpoint: Checkpoint) -> None:
    """Pairs of letters as tokens: the reference's −log2 p of all tokens over the text's bytes."""
    text = "And it came to pass in those days, that there went out a decree from Caesar Augustus"
    pairs = sorted({text[i : i + 2] for i in range(len(text) - 1)})
    ids = {chr(i): i for i in range(128)} | {pair: 128 + n for n, pair in enumerate(pairs)}

    def encoder(text: str) -> list[int]:
        return [ids[text[i : i + 2]] for i in range(0, len(text), 2)]

    pieces = [token.encode() for token in ids]
    tokenizer = Tokenizer(encoder, pieces, special={}, bos=())
    tokens, window, nats = encoder(text), 16, 0.0
    model = checkpoint.reference()
    for start, end, scored in windows(len(tokens), window):
        part = tokens[start:end]
        with torch.no_grad():
            scores = model(torch.tensor([[256, *part[:-1]]]))[0].log_softmax(-1)
        nats -= float(scores[range(len(part)), part][scored - start :].sum())
    bits = bits_per_byte(chain, tokenizer, text.encode(), window)
    assert bits == pytest.approx(nats / math.log(2) / len(text), rel=1e-5)


def test_bits_per_byte_are_of_the_text_that_was_given(chain: Chain) -> None:
    tokenizer = byte_tokenizer(chain.config)
    assert 0 < bits_per_byte(chain, tokenizer, b"\xff is no UTF-8") < 40
    lower = Tokenizer(lambda text: [*text.lower().encode()], tokenizer.pieces, {}, ())
    with pytest.raises(StepError, match="text: tokens that spell it expected"):
        bits_per_byte(chain, lower, b"And")
    with pytest.raises(StepError, match="at least one byte"):
        bits_per_byte(chain, tokenizer, b"")


def test_an_id_beyond_the_vocabulary_is_refused_before_anything_runs(
    chain: Chain, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chain, "step", lambda *arguments: pytest.fail("a step was taken"))
    handle = chain.cache.allocate()
    for token in (258, -1):
        with pytest.raises(StepError, match=rf"token {token}: below vocab_size \(258\) expected"):
            next(prefill(chain, handle, [1, 2, 3, token], chunk=2))
        with pytest.raises(StepError, match=rf"token {token}: below vocab_size \(258\) expected"):
            next(generate(chain, [1, 2, 3, token], 1, Sampler(), chunk=2))


def test_the_small_model_beats_xz_and_the_bar(checkpoint: Checkpoint) -> None:
    """On the reference: at most 2.3 bits per byte, and fewer than xz -9 needs for the file."""
    text = (NANO / "heldout.txt").read_bytes()
    assert len(text) <= 65536
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


def test_windows_score_each_byte_once_with_half_a_window_before_it() -> None:
    for length in (1, 511, 512, 1000, 5000):
        spans = windows(length)
        scored = [i for start, end, first in spans for i in range(first, end)]
        assert scored == list(range(length))
        assert all(end - start <= 511 for start, end, _ in spans)
        assert all(first - start >= 255 for start, end, first in spans[1:])


def test_sampling_is_seeded_and_follows_the_softmax() -> None:
    logits = np.log(np.array([0.1, 0.6, 0.3], np.float32))
    draws = [Sampler(1.0, seed)(logits) for seed in range(2000)]
    assert np.bincount(draws) / 2000 == pytest.approx([0.1, 0.6, 0.3], abs=0.04)
    first, second = (Sampler(1.0, 7) for _ in range(2))
    assert [first(logits) for _ in range(20)] == [second(logits) for _ in range(20)]
    assert Sampler()(np.array([1.0, 3.0, 3.0])) == 1
    assert {Sampler(1e-3, s)(logits) for s in range(50)} == {1}
