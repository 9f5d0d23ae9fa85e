"""Scores of a text: the rule, the file, the command; and the table of what precisions cost."""

import json
import math
import shutil
import tracemalloc
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from bench.quality.fp8_by_layer import KINDS, kind_of, with_fp8
from bench.quality.int4_checkpoint import app as int4_app
from bench.quality.int4_checkpoint import int4_config
from bench.quality.quality import BAR, FP8, ROUNDED, QualityRow, failure
from bench.quality.quality import app as quality_app
from export.checkpoint.open import Checkpoint
from export.checkpoint.tensor_names import is_linear, is_routed
from export.golden.rounded import RoundedLinear
from export.packing.pack import pack
from graphs import scoring
from graphs.contract.config import load_raw_config
from graphs.contract.manifest import Profile
from graphs.contract.quantization import Int4Groups
from graphs.contract.spec import BuildError, BuildSpec, Precision, config_hash, layer_file
from graphs.contract.tensorfile import Array, TensorFile, write_arrays
from graphs.scoring import WINDOW, Scores, divergence, scored_logits, windows
from runtime.__main__ import app
from runtime.evaluate import evaluate
from runtime.load import load_chain
from runtime.step.chain import Chain, StepError
from runtime.tokenizers.base import Tokenizer, byte_tokenizer
from tests.support.builds import NANO, Build
from tests.support.helpers import tiny_checkpoint, tiny_config

TEXT = (NANO / "heldout.txt").read_bytes()


def damaged(build: Path, copy: Path) -> Path:
    """A copy of a build whose first block's feed-forward norm is off by a third."""
    shutil.copytree(build, copy, ignore=shutil.ignore_patterns("golden"))
    file = TensorFile.open(copy / layer_file(0))
    arrays = {name: array.copy() for name, array in file.tensors.items()}
    arrays["post_norm.weight"] *= np.float32(1.33)
    write_arrays(file.path, arrays, file.metadata)
    return copy


def random_logits(rows: int, vocab: int) -> Array:
    return 3 * np.random.default_rng(0).standard_normal((rows, vocab), np.float32)


# The rule


def test_windows_score_each_byte_once_with_half_a_window_before_it() -> None:
    for length in (1, 511, 512, 1000, 5000):
        spans = windows(length)
        scored = [i for start, end, first in spans for i in range(first, end)]
        assert scored == list(range(length))
        assert all(end - start <= 511 for start, end, _ in spans)
        assert all(first - start >= 255 for start, end, first in spans[1:])


@pytest.mark.parametrize("length", [1, 15, 16, 100])
@pytest.mark.parametrize("piece", [1, 3, 7, 16])
def test_every_token_meets_the_logits_of_the_one_before_it(length: int, piece: int) -> None:
    """Logits that name their input; in whole windows, and in pieces that end anywhere."""
    tokens = np.random.default_rng(length).integers(0, 50, length).tolist()

    def logits(ids: Sequence[int]) -> list[Array]:
        rows = np.eye(51, dtype=np.float32)[list(ids)]
        return [rows[i : i + piece] for i in range(0, len(rows), piece)]

    parts = list(scored_logits(logits, tokens, 50, window=16))
    assert np.concatenate([targets for targets, _ in parts]).tolist() == tokens
    seen = np.concatenate([rows for _, rows in parts]).argmax(axis=1).tolist()
    assert seen == [50, *tokens[:-1]]
    of_bytes = scored_logits(logits, bytes(tokens), 50, window=16)
    assert np.concatenate([targets for targets, _ in of_bytes]).tolist() == tokens


def test_a_token_has_its_surprisal_the_likeliest_id_and_its_lead() -> None:
    logits, targets = random_logits(40, 30), np.arange(40) % 30
    scores = Scores.from_logits([(targets[:25], logits[:25]), (targets[25:], logits[25:])], 100)
    probabilities = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    assert scores.tokens.tolist() == targets.tolist()
    assert scores.nats == pytest.approx(-np.log(probabilities[np.arange(40), targets]), rel=1e-5)
    assert scores.top.tolist() == logits.argmax(axis=1).tolist()
    ordered = np.sort(logits, axis=1)
    assert np.array_equal(scores.margin, ordered[:, -1] - ordered[:, -2])
    assert scores.bits == pytest.approx(float(scores.nats.sum()) / math.log(2))
    assert scores.bits_per_byte * 100 == pytest.approx(scores.bits_per_token * 40)


def test_blocks_of_rows_change_no_bit_and_bound_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    vocab, targets = 163_840, np.arange(48)
    logits = random_logits(48, vocab)
    tracemalloc.start()
    scores = Scores.from_logits([(targets, logits)], 1)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4 * 8 * scoring.WIDENED < logits.nbytes * 2  # float64 alone takes the latter
    apart = divergence(logits, logits[::-1])
    monkeypatch.setattr(scoring, "WIDENED", 1 << 40)
    whole = Scores.from_logits([(targets, logits)], 1)
    for name in ("nats", "top", "margin"):
        assert np.array_equal(getattr(scores, name), getattr(whole, name))
    assert np.array_equal(apart, divergence(logits, logits[::-1]))


def test_divergence_is_that_of_the_softmax() -> None:
    ours, others = random_logits(8, 20), random_logits(9, 20)[1:]
    logs = [torch.from_numpy(x).double().log_softmax(-1) for x in (ours, others)]
    expected = torch.nn.functional.kl_div(logs[1], logs[0], reduction="none", log_target=True)
    assert divergence(ours, others) == pytest.approx(expected.sum(-1).numpy())
    assert np.abs(divergence(ours, ours + np.float32(7))).max() < 1e-6


# Files and comparison


def test_a_scores_file_is_what_was_scored(tmp_path: Path) -> None:
    scores = Scores.from_logits([(np.arange(12), random_logits(12, 20))], 34)
    scores.save(tmp_path / "scores")
    loaded = Scores.load(tmp_path / "scores")
    assert loaded.text_bytes == 34
    for name in ("tokens", "nats", "top", "margin"):
        assert np.array_equal(getattr(loaded, name), getattr(scores, name))
    with pytest.raises(BuildError, match=r"content: expected 'scores of a text.*', got None"):
        Scores.load(NANO / "model-00001-of-000002.safetensors")


def test_comparison_counts_other_likeliest_tokens_and_by_how_much_they_led() -> None:
    targets, logits = np.arange(12), random_logits(12, 20)
    reference = Scores.from_logits([(targets, logits)], 12)
    assert reference.against(reference) == scoring.ScoreComparison(0, 1, 0)
    logits[[2, 5], (reference.top[[2, 5]] + 1) % 20] = 50
    compared = Scores.from_logits([(targets, logits)], 12).against(reference)
    assert compared.agreement == pytest.approx(10 / 12) and compared.change > 0
    assert compared.margin == max(reference.margin[[2, 5]])
    other = Scores.from_logits([(targets[::-1], logits)], 12)
    with pytest.raises(BuildError, match="another text or tokenizer"):
        other.against(reference)


# Builds


def test_fp8_costs_at_most_its_bar(nano: Build) -> None:
    """On the first 2 KB here; `make quality` gives the whole held-out text."""
    profile = Profile(tokens=512, context=512)
    chains = (load_chain(nano(p), profile=profile, threads=1) for p in ("fp32", "fp8"))
    fp32, fp8 = (evaluate(c, byte_tokenizer(c.config), TEXT[:2048]) for c in chains)
    compared = fp8.against(fp32)
    assert compared.change <= BAR and 0.97 < compared.agreement < 1


def test_bits_of_tokens_that_are_not_bytes(chain: Chain, checkpoint: Checkpoint) -> None:
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
    whole = evaluate(chain, tokenizer, text.encode(), window)
    assert whole.bits_per_byte == pytest.approx(nats / math.log(2) / len(text), rel=1e-5)
    assert whole.bits_per_token == pytest.approx(nats / math.log(2) / len(tokens), rel=1e-5)
    assert not chain.cache.handles


def test_bits_are_of_the_text_that_was_given(chain: Chain) -> None:
    tokenizer = byte_tokenizer(chain.config)
    assert 0 < evaluate(chain, tokenizer, b"\xff is no UTF-8").bits_per_byte < 40
    lower = Tokenizer(lambda text: [*text.lower().encode()], tokenizer.pieces, {}, ())
    with pytest.raises(StepError, match="text: expected tokens that spell it"):
        evaluate(chain, lower, b"And")
    with pytest.raises(StepError, match="text: expected at least one byte"):
        evaluate(chain, tokenizer, b"")


def test_the_command_compares_a_build_with_itself_and_with_a_damaged_one(
    nano: Build, tmp_path: Path
) -> None:
    text, scores = tmp_path / "text", tmp_path / "scores"
    text.write_bytes(TEXT[:600])

    def run(build: Path, *arguments: str | Path) -> list[str]:
        done = CliRunner().invoke(
            app, ["evaluate", str(build), "--text", str(text), *map(str, arguments)]
        )
        assert done.exit_code == 0, done.output
        return done.output.splitlines()

    fp32 = nano("fp32")
    (first,) = run(fp32, "--out", scores)
    assert first.endswith(" bits per token: 600 bytes, 600 tokens")
    assert float(first.split()[0]) == pytest.approx(Scores.load(scores).bits_per_byte, abs=1e-4)
    _, same = run(fp32, "--against", scores)
    assert same == f"against {scores}: +0.000% bits, the same likeliest token for 100.00%"
    _, other = run(damaged(fp32, tmp_path / "damaged"), "--against", scores)
    assert "for 100.00%" not in other and "; the others led by at most " in other


@pytest.mark.parametrize(
    "arguments, expected",
    [
        (["--out", "no/scores"], "no: no such folder for --out"),
        (["--against", "text"], "not a complete safetensors file"),
    ],
)
def test_what_cannot_be_written_or_compared_is_said_before_anything_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], expected: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("text").write_bytes(b"text")
    done = CliRunner().invoke(app, ["evaluate", "no-build", "--text", "text", *arguments])
    assert isinstance(done.exception, BuildError) and expected in str(done.exception)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_rounding_as_an_engine_does_costs_few_bits(nano: Build, precision: Precision) -> None:
    """The bar is 0.25 % of fp32's; and rounding is there to be seen in the logits."""
    text = TEXT[:4096]
    profile = Profile(tokens=WINDOW, context=WINDOW)

    def score(precision: Precision, rounded: bool = False) -> Scores:
        chain = load_chain(nano(precision), profile=profile, threads=1, rounded=rounded)
        return evaluate(chain, byte_tokenizer(chain.config), text)

    fp32, widened, rounded = score("fp32"), score(precision), score(precision, rounded=True)
    assert abs(rounded.bits_per_byte - fp32.bits_per_byte) <= BAR * fp32.bits_per_byte
    assert rounded.bits_per_byte != widened.bits_per_byte


# What precisions cost: bench/quality/quality.py


@pytest.fixture(scope="module")
def int4(nano: Build, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """k2-nano with INT4 experts: `checkpoint`, and its fp8 build.

    Its graphs are k2-nano's own: they do not depend on how a checkpoint stores its weights.
    """
    folder = tmp_path_factory.mktemp("int4")
    done = CliRunner().invoke(int4_app, [str(NANO), str(folder / "checkpoint")])
    assert done.exit_code == 0, done.output
    checkpoint = Checkpoint.open(folder / "checkpoint")
    shutil.copytree(nano("fp8") / "onnx", folder / "fp8" / "onnx")
    raw = checkpoint.raw_config
    spec = BuildSpec.load(nano("fp8"))
    replace(spec, raw_config=raw, config_sha256=config_hash(raw)).save(folder / "fp8")
    pack(checkpoint, folder / "fp8")
    return folder


def test_experts_alone_are_int4_within_half_a_step(int4: Path, checkpoint: Checkpoint) -> None:
    stored_as = Checkpoint.open(int4 / "checkpoint")
    assert isinstance(stored_as.config.quantization, Int4Groups)
    assert stored_as.config.quantization.group_size == 16
    for name in stored_as.shapes:
        stored, original = stored_as.wide(name), checkpoint.wide(name)
        error = (stored - original).abs()
        if is_routed(name):
            steps = original.view(len(original), -1, 16).abs().amax(-1, keepdim=True) / 7
            assert (error.view(len(original), -1, 16) <= 0.53 * steps).all() and error.max() > 0
        else:
            assert (error <= original.abs() / 256).all()


def test_groups_are_those_of_the_published_model_where_its_experts_allow_them() -> None:
    """72 inputs of an expert's down projection: in groups of 8."""
    for raw, size in ((load_raw_config("k2"), 32), (tiny_config(), 8)):
        groups = int4_config(raw)["quantization_config"]["config_groups"]
        assert groups["group_0"]["weights"]["group_size"] == size
    published = load_raw_config("k2-thinking")["quantization_config"]
    assert int4_config(load_raw_config("k2"))["quantization_config"] == published


def test_every_linear_layer_that_fp8_packs_is_of_one_kind(tmp_path: Path) -> None:
    opened = Checkpoint.open(tiny_checkpoint(tmp_path))
    packed = {n for n in opened.shapes if is_linear(n) and "kv_b_proj" not in n}
    assert {n for n in opened.shapes if kind_of(n)} == packed
    assert {kind_of(n) for n in packed} == set(KINDS)
    model = with_fp8(opened, "experts.down", "attention.o")
    rounded = {n for n, m in model.named_modules() if isinstance(m, RoundedLinear)}
    assert {kind_of(f"{n}.weight") for n in rounded} == {"experts.down", "attention.o"}
    assert len(rounded) == 3 + 2 * 8
    reads_h = {
        m.bf16_input
        for m in with_fp8(opened, "experts.gate_up").modules()
        if isinstance(m, RoundedLinear)
    }
    assert reads_h == {True}


@pytest.mark.parametrize("name", [FP8, *ROUNDED.values()])
@pytest.mark.parametrize("change, fails", [(BAR, False), (BAR * 1.01, True), (-1.0, False)])
def test_the_bar(name: str, change: float, fails: bool) -> None:
    message = failure(
        [QualityRow("fp32", "fp32", 1.7, 1.0, 1, 0), QualityRow(name, "fp32", 1.7, change, 1, 0)]
    )
    assert (message is not None) == fails
    assert message is None or "expected at most 0.25% more bits than fp32, got +0.25" in message


@pytest.mark.slow
def test_a_damaged_fp8_build_fails_with_both_tables(
    nano: Build, int4: Path, tmp_path: Path
) -> None:
    for precision in ("fp32", "bf16"):
        (tmp_path / precision).symlink_to(nano(precision))
    (tmp_path / "int4").symlink_to(int4)
    damaged(nano("fp8"), tmp_path / "fp8")
    (tmp_path / "text").write_bytes(TEXT[:400])
    arguments = [NANO, tmp_path, "--text", tmp_path / "text", "--part", 100]
    done = CliRunner().invoke(quality_app, list(map(str, arguments)))
    assert (
        done.exit_code == 1
        and "error: fp8: per channel × per token: expected at most 0.25%" in done.stderr
    )
    assert done.stdout.count("| bits per byte |") == 2
    assert "400 bytes; INT4 in groups of 16" in done.stdout
    result = json.loads((tmp_path / "quality.json").read_text())
    first = {(row["name"], row["against"]): row for row in result["by_precision"]}
    stored = first["checkpoint decoded exactly", "fp32"]
    assert abs(stored["change"]) < 1e-5 and stored["agreement"] == 1
    assert first[FP8, "fp32"]["change"] > BAR and first[FP8, "fp32"]["divergence"] > 1e-3
    int4_rows = [row for row in result["by_precision"] if row["name"] == "INT4 experts → fp8"]
    assert [row["against"] for row in int4_rows] == ["fp32", "INT4 experts decoded exactly"]
    assert {row["name"] for row in result["by_layer"]} == {*KINDS, "all of these"}
    costs = [row["divergence"] for row in result["by_layer"]]
    assert costs == sorted(costs, reverse=True) and min(costs) > 0 and max(costs) < 0.05
