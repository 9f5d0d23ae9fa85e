"""Traffic, memory and cards: against a published roofline, real graphs' inputs, and counting."""

import dataclasses
import itertools
import json
import math
import re
import statistics
from pathlib import Path

import pytest
from typer.testing import CliRunner

from graphs.__main__ import app
from graphs.budget.gpus import GPUS, UnknownGpuError, find_gpu
from graphs.budget.memory import Memory, cards_of_whole_layers, cards_split_evenly, memory
from graphs.budget.traffic import (
    Traffic,
    chain_traffic,
    distinct_experts,
    graph_traffic,
    roofline_seconds,
)
from graphs.contract.config import PRESETS, load_config
from graphs.contract.manifest import Profile
from graphs.contract.spec import BuildSpec, GraphName, TensorSpec
from graphs.contract.tensorfile import DTYPES
from graphs.engines.targets import TARGETS
from tests.support.builds import Build
from tests.support.helpers import tiny_config

K2 = load_config("k2")
H200 = find_gpu("h200")


@pytest.mark.parametrize(
    ("cached", "mflop", "megabytes"), [(1000, 156, 17.9), (4096, 587, 21.5), (32768, 4580, 54.5)]
)
def test_the_core_of_absorbed_attention(cached: int, mflop: int, megabytes: float) -> None:
    """K2's dense block at fp8 computes it in bf16: W_UK, W_UV, scores and mix."""
    step = graph_traffic(K2, "dense", "fp8", batch=1, tokens=1, cached=cached)
    assert round(step.flops["bf16"] / 1e6) == pytest.approx(mflop, abs=1)
    absorbed = 2 * 2 * 64 * 128 * 512
    assert round((absorbed + step.cache) / 1e6, 1) == megabytes
    assert step.flops["fp8"] == 2 * (497_500_160 - 2 * 7168 - 1536 - 512 - 2 * 64 * 128 * 512)


@pytest.mark.parametrize(("experts", "chosen", "tokens"), [(4, 2, 1), (4, 2, 3), (5, 1, 4)])
def test_distinct_experts_are_the_mean_over_all_choices(
    experts: int, chosen: int, tokens: int
) -> None:
    choices = list(itertools.combinations(range(experts), chosen))
    counts = (len(set().union(*draw)) for draw in itertools.product(choices, repeat=tokens))
    config = dataclasses.replace(K2, n_routed_experts=experts, num_experts_per_tok=chosen)
    assert distinct_experts(config, tokens) == pytest.approx(statistics.mean(counts))


@pytest.fixture(scope="module", params=["fp8", "fp32"])
def spec(request: pytest.FixtureRequest, nano: Build) -> BuildSpec:
    """The spec of k2-nano's build."""
    return BuildSpec.load(nano(request.param))


def bytes_of(tensors: list[TensorSpec]) -> int:
    return sum(math.prod(t.shape({})) * DTYPES[t.dtype][1].itemsize for t in tensors)


@pytest.mark.parametrize("graph", ["dense", "moe", "head"])
def test_a_graph_reads_the_weights_that_are_its_inputs(graph: GraphName, spec: BuildSpec) -> None:
    step = graph_traffic(spec.config, graph, spec.precision, batch=2, tokens=3, cached=5)
    assert step.weights == bytes_of(list(spec.graphs[graph].weights))


def test_many_tokens_read_every_expert_and_one_token_its_own(spec: BuildSpec) -> None:
    config, sizes = spec.config, {"tokens": 1, "cached": 5}
    slot = [t for t in spec.graphs["experts"].weights if t.name.startswith("slots.0.")]
    for batch, experts in ((1, config.num_experts_per_tok), (500, config.n_routed_experts)):
        step = graph_traffic(config, "experts", spec.precision, batch=batch, **sizes)
        assert step.weights == pytest.approx(experts * bytes_of(slot))


def test_a_step_of_the_model_is_the_sum_of_its_layers(spec: BuildSpec) -> None:
    config, sizes = spec.config, {"batch": 2, "tokens": 1, "cached": 5}

    def traffic(graph: GraphName) -> Traffic:
        return graph_traffic(config, graph, spec.precision, **sizes)

    whole = chain_traffic(config, spec.precision, **sizes)
    dense, moe = config.count("dense"), config.count("moe")
    parts = (
        [traffic("dense")] * dense + [traffic("moe"), traffic("experts")] * moe + [traffic("head")]
    )
    assert whole.bytes == pytest.approx(sum(part.bytes for part in parts))
    for precision in whole.flops:
        assert whole.flops[precision] == pytest.approx(sum(p.flops[precision] for p in parts))
    width = config.cache_width * (4 if spec.precision == "fp32" else 2)
    assert whole.cache == config.num_hidden_layers * 2 * (5 + 1) * width


def test_weights_in_memory_are_all_that_a_build_packs_but_the_embedding(spec: BuildSpec) -> None:
    layers = [list(spec.layer_tensors(i).values()) for i in range(spec.config.num_hidden_layers)]
    tables = [t for t in spec.graphs["dense"].inputs if t.kind == "table"]
    sizes = memory(spec, Profile(batch=4, tokens=8, context=64))
    assert sizes.layers == tuple(map(bytes_of, layers))
    assert sizes.head == bytes_of(list(spec.graphs["head"].weights))
    assert sizes.rope == bytes_of(tables)
    width = spec.config.cache_width * (4 if spec.precision == "fp32" else 2)
    assert sizes.cache_of_all_layers == len(layers) * 4 * 64 * width


@pytest.mark.parametrize(
    ("room", "whole", "split"),
    [(47, 1, 1), (46, 2, 2), (25, 2, 2), (24, 3, 2), (21, 4, 3), (13, 5, 4), (10, None, 5)],
)
def test_cards_take_whole_layers_in_turn(room: int, whole: int | None, split: int) -> None:
    """Four layers of 10 with 1 of cache each, then a head of 3; 5 of scratch and 2 of tables."""
    sizes = Memory((10, 10, 10, 10), head=3, cache=1, scratch=5, rope=2)
    gpu = dataclasses.replace(H200, memory=room + 7)
    assert cards_of_whole_layers(sizes, gpu) == whole
    assert cards_split_evenly(sizes, gpu) == split
    assert cards_split_evenly(sizes, dataclasses.replace(H200, memory=7)) is None


def test_gpus_are_found_however_they_are_written() -> None:
    for name in ("rtx-pro-6000", "RTX PRO 6000", "RTX_Pro_6000", "rtxpro6000"):
        assert find_gpu(name) is GPUS["rtx-pro-6000"]
    with pytest.raises(UnknownGpuError, match=r"GPU: expected one of h100, .*, got 'rtx-6000'"):
        find_gpu("rtx-6000")


def test_rates_are_those_of_dense_matrices() -> None:
    """fp8 twice bf16, which is not so where one of them counts sparsity; all can be built for."""
    for gpu in GPUS.values():
        assert gpu.flops["fp8"] / gpu.flops["bf16"] == pytest.approx(2, rel=0.02), gpu.name
        assert gpu.flops["bf16"] > gpu.flops["fp32"]
        assert gpu.sm in TARGETS["tensorrt"] and gpu.source
    assert (H200.flops["bf16"], H200.flops["fp8"], H200.bandwidth) == (989e12, 1979e12, 4.8e12)


def test_a_roofline_is_the_longer_of_moving_and_computing() -> None:
    moving = Traffic(weights=3.6e12, cache=0.9e12, activations=0.3e12, flops={"bf16": 989e9})
    assert roofline_seconds(moving, H200) == pytest.approx(1)
    computing = dataclasses.replace(moving, flops={"bf16": 989e12, "fp8": 1979e12})
    assert roofline_seconds(computing, H200) == pytest.approx(2)


def run(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["budget", *arguments])
    assert result.exit_code == 0, result.output
    return result.stdout


def test_json_holds_memory_cards_steps_and_sequences() -> None:
    figures = json.loads(run("k2", "--gpu", "h200", "--gpu", "rtx-5090", "--json"))
    assert figures["gpus"]["h200"]["memory"] == 141 * 10**9
    k2 = figures["models"]["k2"]
    assert k2["memory"]["cards"]["h200"] == {"whole_layers": 8, "split_evenly": 8}
    assert k2["memory"]["cards"]["rtx-5090"] == {"whole_layers": 60, "split_evenly": 33}
    assert k2["memory"]["cache"] == 8 * 4096 * 70_272
    graphs = [(step["graph"], step["mode"]) for step in k2["steps"]]
    names = ("dense", "moe", "experts", "head", "model")
    assert graphs == [(name, mode) for mode in ("decode", "prefill") for name in names]
    for step in k2["steps"]:
        assert step["seconds"]["rtx-5090"]["roofline"] > step["seconds"]["h200"]["roofline"] > 0
    assert [row["sequences"] for row in k2["sequences"]] == [1, 2, 4, 8, 16, 32, 64, 128]
    for row in k2["sequences"]:
        seconds = row["seconds"]["h200"]["roofline"]
        assert row["tokens_per_second"]["h200"] == pytest.approx(row["sequences"] / seconds)


def test_without_a_model_every_preset_is_listed_with_its_cards() -> None:
    lines = run().splitlines()
    for preset in PRESETS.glob("*.json"):
        (row,) = [line.split() for line in lines if line.split()[:1] == [preset.stem]]
        ones = row.count("one")
        assert ones == (len(GPUS) if preset.stem in ("moonlight", "deepseek-v2-lite") else 0)


def test_tables_of_all_gpus_cut_no_figure() -> None:
    assert "…" not in run("k2")


def test_the_docs_show_what_the_command_prints() -> None:
    page = (Path(__file__).parents[3] / "docs/budgets.md").read_text("utf-8")
    blocks = re.findall(r"^```\n\$ python -m graphs budget(.*?)\n(.*?)^```", page, re.S | re.M)
    assert len(blocks) == 2
    for arguments, text in blocks:
        printed = {line.rstrip() for line in run(*arguments.split()).splitlines()}
        assert set(text.splitlines()) - {"…"} <= printed


def test_a_config_file_is_taken_too(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(tiny_config()), encoding="utf-8")
    figures = json.loads(run(str(path), "--precision", "fp32", "--batch", "2", "--json"))
    assert figures["models"][str(path)]["profile"] == {"batch": 2, "tokens": 128, "context": 4096}


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["--gpu", "abacus"], "got 'abacus'"),
        (["k3"], "no such preset"),
        (["k2", "--tokens", "1"], "tokens: expected at least 2, got 1"),
    ],
)
def test_what_cannot_be_computed_is_refused(arguments: list[str], error: str) -> None:
    result = CliRunner().invoke(app, ["budget", *arguments])
    assert isinstance(result.exception, ValueError) and error in str(result.exception)
