"""`make bench` on k2-nano: what it writes, what it is held to, and that both sides do the same."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from bench.speed import bars, dense_block
from bench.speed import run as bench_run
from bench.speed.bars import SpeedBar, faster, judge
from bench.speed.deepseek_v3 import DeepseekLayer
from bench.speed.dense_block import (
    INVARIANT,
    OURS,
    TRANSFORMERS,
    MeasuredBlock,
    SpeedError,
    compare,
    growth,
)
from bench.speed.end_to_end import PROMPT_TOKENS, compare_generation, pieces
from bench.speed.limits import multiplying, reading
from export.checkpoint.open import Checkpoint
from runtime.benchmark.cases import BenchCase
from runtime.benchmark.measurements import BenchReport, BenchReportError, Measurement, in_turns
from tests.support.builds import NANO, Build

LONE, BATCH, PREFILL = BenchCase(1, 1, 100), BenchCase(4, 1, 100), BenchCase(1, 16, 0)


@pytest.fixture(scope="module")
def subject(nano: Build, checkpoint: Checkpoint) -> MeasuredBlock:
    layer = DeepseekLayer(checkpoint)
    return MeasuredBlock(nano("fp32"), layer, reading(8 << 20), multiplying(64), threads=1)


@pytest.fixture(scope="module")
def written(nano: Build, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder of a whole quick run, and what it printed."""
    out, build = tmp_path_factory.mktemp("bench"), str(nano("fp32"))
    arguments = ["measure", build, str(NANO), build, str(NANO), "--quick", "--rounds", "2"]
    arguments += ["--text", str(NANO / "heldout.txt"), "--out", str(out), "--threads", "1"]
    done = CliRunner().invoke(bench_run.app, arguments, catch_exceptions=False)
    assert done.exit_code == 0
    return out, done.output


def test_the_report_has_every_case_by_everyone(written: tuple[Path, str]) -> None:
    raw = json.loads((written[0] / "bench.json").read_text())
    found = {(m["what"], m["by"], tuple(m["case"].values())) for m in raw["measurements"]}
    for by in (OURS, INVARIANT, *TRANSFORMERS):
        assert {("decode", by, (1, 1, 100)), ("decode", by, (1, 1, 400))} <= found
        assert {("generate", by, (n, PROMPT_TOKENS, 8)) for n in (1, 4)} <= found
    for by in (OURS, *TRANSFORMERS):
        assert {("decode", by, (4, 1, 100)), ("prefill", by, (1, 16, 0))} <= found
    assert {("step", OURS, (100, 256)), ("step", OURS, (100, 1024))} <= found
    for m in raw["measurements"]:
        assert len(m["seconds"]) == (6 if m["what"] == "step" else 2) and min(m["seconds"]) > 0
        low, high = m["middle_half"]
        assert low <= m["median"] <= high
    assert raw["machine"]["threads"] == 1 and raw["machine"]["cores"] >= 1
    assert {"torch", "transformers", "onnxruntime-gpu"} <= set(raw["versions"])


def test_what_is_computed_is_in_the_report(written: tuple[Path, str]) -> None:
    computed = BenchReport.load(written[0] / "bench.json").computed
    assert computed["bandwidth"] > 0
    assert set(computed["max_error"]) == {str(case) for case in bench_run.QUICK.cases}
    assert 0 < max(computed["max_error"].values()) <= dense_block.AGREEING
    assert computed["tokens_equal"] == {"1": 1.0, "4": 1.0}
    (bar,) = computed["bars"]
    assert bar["what"] == "a step on 100 rows, a cache of 1,024 over one of 256"


def test_tables_and_plots_show_it(written: tuple[Path, str]) -> None:
    out, printed = written
    for plot in ("decode.png", "bars.png"):
        assert (out / plot).read_bytes().startswith(b"\x89PNG") and (
            out / plot
        ).stat().st_size > 5000
    assert "4 prompts, 8 new tokens" in printed and "GB/s" in printed
    done = CliRunner().invoke(bench_run.app, ["markdown", str(out / "bench.json")])
    lines = done.output.splitlines()
    (decode,) = [line for line in lines if line.startswith("| decode, 1 × 400 cached ")]
    assert decode.count("|") == lines[0].count("|") == 8
    assert "- a step on 100 rows" in done.output


def test_the_same_report_is_read_again(written: tuple[Path, str], tmp_path: Path) -> None:
    path = written[0] / "bench.json"
    BenchReport.load(path).save(tmp_path / "again.json")
    assert (tmp_path / "again.json").read_bytes() == path.read_bytes()


@pytest.mark.parametrize("content", ["", "{}", '{"format": 0}'])
def test_what_is_no_report_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "bench.json"
    path.write_text(content)
    with pytest.raises(BenchReportError, match=r"bench\.json: expected a benchmark's report"):
        BenchReport.load(path)


@pytest.mark.parametrize("case", [LONE, BATCH, PREFILL], ids=str)
def test_both_sides_compute_the_same(subject: MeasuredBlock, case: BenchCase) -> None:
    found = compare(subject, case, rounds=1)
    assert found.error <= dense_block.AGREEING
    assert [m.by for m in found.measurements if m.by == INVARIANT] == [INVARIANT] * (case == LONE)


@pytest.mark.parametrize("case", [LONE, PREFILL], ids=str)
@pytest.mark.parametrize("weight", ["mlp.down_proj.weight", "self_attn.kv_b_proj.weight"])
def test_another_weight_is_seen(subject: MeasuredBlock, case: BenchCase, weight: str) -> None:
    parameter = subject.layer.layer.get_parameter(weight)
    parameter.mul_(1.01)
    try:
        with pytest.raises(
            SpeedError, match=rf"{case}, ours.* against transformers eager: expected max"
        ):
            compare(subject, case, rounds=1)
    finally:
        parameter.div_(1.01)


def test_a_step_of_ours_is_the_chains_own(subject: MeasuredBlock) -> None:
    """What is repeated gives what a step of the chain gives, and only reads the cache."""
    with dense_block.our_step(subject, BATCH, batch_invariant=False) as ours:
        first = ours.run().copy()
        assert np.array_equal(ours.run(), first) and np.abs(first).max() > 0
        assert ours.x.shape == first.shape == (4, 1, 224) and ours.rows.shape == (4, 100, 144)


def test_the_floor_is_of_weights_cached_rows_and_new_ones(
    subject: MeasuredBlock, checkpoint: Checkpoint
) -> None:
    names = [n for n in checkpoint.shapes if n.startswith("model.layers.0.")]
    weights = sum(int(np.prod(checkpoint.shapes[name])) for name in names)
    with dense_block.our_step(subject, BATCH, batch_invariant=False) as ours:
        assert ours.needed_bytes == 4 * (weights + 4 * 100 * 144 + 4 * 144)


def test_the_floor_is_needed_bytes_at_the_rate_of_the_same_run(subject: MeasuredBlock) -> None:
    (ours, *_, read) = compare(subject, LONE, rounds=3).measurements
    rate = subject.reading.count / read.median
    with dense_block.our_step(subject, LONE, batch_invariant=False) as step:
        assert ours.floor_seconds == pytest.approx(step.needed_bytes / rate)
    assert read.by == "memory" and read.case["B"] == subject.reading.count == 8 << 20


def test_the_floor_of_a_prefill_is_its_operations(subject: MeasuredBlock) -> None:
    (ours, *_, multiply) = compare(subject, PREFILL, rounds=3).measurements
    assert multiply.by == "arithmetic" and multiply.case["FLOP"] == 2 * 64**3
    with dense_block.our_step(subject, PREFILL, batch_invariant=False) as step:
        assert ours.floor_seconds == pytest.approx(step.needed_flops * multiply.median / 2 / 64**3)
        weights = step.needed_bytes / 4  # but for norms and cached rows
        assert step.needed_flops == pytest.approx(2 * 16 * weights, rel=0.05)


def test_a_larger_cache_holds_the_same_step(subject: MeasuredBlock) -> None:
    small, large = growth(subject, 100, (256, 1024), rounds=3)
    assert (small.case["cache_rows"], large.case["cache_rows"]) == (256, 1024)
    assert len(small.seconds) == len(large.seconds) == 3


CASE = BenchCase(1, 1, 1000)


def planted(**seconds: tuple[float, ...]) -> BenchReport:
    """A decode step on 1,000 rows: 1 s for ours, 5 and 6 for transformers, at 2 GB/s, floor 0.8."""
    of = {"ours": (1.0, 1.0), "eager": (5.0, 5.0), "sdpa": (6.0, 6.0), "read": (2.0, 2.0)} | seconds
    read = CASE.sizes | {"B": 4_000_000_000}
    return BenchReport(
        {},
        {},
        [
            Measurement("decode", OURS, CASE.sizes, of["ours"], 0.8, "1.6 GB at 2.0 GB/s"),
            Measurement("decode", TRANSFORMERS[0], CASE.sizes, of["eager"]),
            Measurement("decode", TRANSFORMERS[1], CASE.sizes, of["sdpa"]),
            Measurement("read", "memory", read, of["read"]),
        ],
    )


def test_bars_that_are_met() -> None:
    times, floor = judge(planted())
    assert (times.ratio, times.bound, times.met) == (5.0, 4.0, True)
    assert floor.ratio == pytest.approx(1.25) and (floor.bound, floor.met) == (1.35, True)


def test_a_slow_run_misses_its_bars() -> None:
    times, floor = judge(planted(ours=(1.5, 1.5)))
    assert not times.met and not floor.met
    assert str(times).endswith("3.33, at least 4: MISSED")
    assert str(floor).endswith("1.88, at most 1.35: MISSED")


def test_the_faster_of_the_two_counts() -> None:
    report = planted(sdpa=(3.0, 3.0))
    assert faster(report, CASE).by == TRANSFORMERS[1]
    assert next(judge(report)).ratio == 3.0


def test_a_ratio_is_of_neighbouring_runs() -> None:
    """A machine that was slow in one round was slow for both."""
    report = planted(ours=(1.0, 1.0, 9.0), eager=(5.0, 5.0, 45.0), read=(2.0, 2.0, 18.0))
    report.measurements[2] = dataclasses.replace(report.measurements[2], seconds=(9.0, 9.0, 90.0))
    times, floor = judge(report)
    assert times.ratio == 5.0 and floor.ratio == pytest.approx(1.25)


@pytest.mark.parametrize(("large", "met"), [(1.09, True), (1.11, False)])
def test_a_cache_that_costs_its_memory_is_missed(large: float, met: bool) -> None:
    steps = [
        Measurement("step", OURS, {"cached": 100, "cache_rows": rows}, (seconds,))
        for rows, seconds in ((32768, large), (1024, 1.0))
    ]
    (bar,) = judge(BenchReport({}, {}, steps))
    assert bar.ratio == pytest.approx(large) and bar.met == met


def test_every_bar_of_the_full_plan_is_measured() -> None:
    measured = {*bench_run.FULL.cases, *bench_run.FULL.slow}
    assert {*bars.TIMES_TRANSFORMERS, *bars.TIMES_FLOOR} <= measured
    assert SpeedBar.from_dict(SpeedBar("x", 1.0, 2.0, most=True).as_dict()) == SpeedBar(
        "x", 1.0, 2.0, most=True
    )


def test_runs_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    monkeypatch.setattr("time.sleep", lambda seconds: done.append(f"{seconds}"))
    runs = {name: lambda name=name: done.append(name) for name in "AB"}
    seconds = in_turns(runs, rounds=2, warm_up=1, pause=0.5)
    assert done == ["0.5", "A", "0.5", "B"] * 3
    assert [len(found) for found in seconds.values()] == [2, 2]


def test_the_rate_at_which_memory_is_read_is_of_all_its_bytes() -> None:
    memory = reading(1 << 20)
    assert memory.count == 1 << 20
    (product,) = {float(torch.as_tensor(memory.run()).sum())}
    assert product == (1 << 20) / 4  # ones: each value was read once


def test_prompts_are_other_ones_every_round() -> None:
    rounds = list(pieces(range(PROMPT_TOKENS * 5), 2))
    assert len(rounds) == 2
    assert [p[0] // PROMPT_TOKENS for prompts in rounds for p in prompts] == [0, 1, 2, 3]
    assert all(len(p) == PROMPT_TOKENS for prompts in rounds for p in prompts)


def test_a_text_that_is_too_short_is_refused(nano: Build) -> None:
    with pytest.raises(SpeedError, match="text: expected at least 256 tokens, got 255"):
        compare_generation(nano("fp32"), NANO, [1] * 255, 4, 8, rounds=1, threads=1)


def test_other_tokens_than_theirs_are_counted(nano: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    from bench.speed import end_to_end

    ours = end_to_end._our_answers

    def last_is_wrong(*arguments: Any) -> Any:
        return [[*tokens[:-1], -1] for tokens in ours(*arguments)]

    monkeypatch.setattr(end_to_end, "_our_answers", last_is_wrong)
    text = list(range(2 * PROMPT_TOKENS))
    assert compare_generation(nano("fp32"), NANO, text, 1, 4, rounds=1, threads=1).same == 0.75
