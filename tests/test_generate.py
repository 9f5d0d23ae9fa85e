"""The command line: text, JSON, errors; and the small model against transformers."""

import hashlib
import json
import lzma
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import NANO, Build
from train import bits_per_byte as reference_bits_per_byte

from export.checkpoint import Checkpoint
from runtime.chain import Chain, StepError
from runtime.generate import generate, prefill
from runtime.sampling import Sampler

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


def test_sampling_is_seeded_and_follows_the_softmax() -> None:
    logits = np.log(np.array([0.1, 0.6, 0.3], np.float32))
    draws = [Sampler(1.0, seed)(logits) for seed in range(2000)]
    assert np.bincount(draws) / 2000 == pytest.approx([0.1, 0.6, 0.3], abs=0.04)
    first, second = (Sampler(1.0, 7) for _ in range(2))
    assert [first(logits) for _ in range(20)] == [second(logits) for _ in range(20)]
    assert Sampler()(np.array([1.0, 3.0, 3.0])) == 1
    assert {Sampler(1e-3, s)(logits) for s in range(50)} == {1}
