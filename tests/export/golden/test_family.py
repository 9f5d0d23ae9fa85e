"""Kimi K2's relatives: the reference against transformers, and small builds against the reference.

The gates are also compared with a second, plain implementation, since transformers has no softmax
gate that normalises.
"""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from export.checkpoint.open import Checkpoint
from export.reference.attention import LatentRows, Taps, causal_mask
from export.reference.block import Block, ReferenceModel
from export.reference.feedforward import Gate
from graphs.contract.config import ModelConfig
from graphs.contract.spec import PRECISIONS, BuildSpec, Precision
from graphs.parity.graphs import graph_parity
from runtime.load import load_chain
from runtime.parity import runtime_parity
from runtime.serving.request import Request
from runtime.serving.scheduler import Scheduler
from tests.support.family import (
    RELATIVES,
    gate_by_hand,
    published_layer,
    published_model,
    published_tables,
    relative_config,
)
from tests.support.helpers import random_state, written
from tests.support.shared_builds import shared_build

EACH = pytest.mark.parametrize("name", RELATIVES)
STARTS = (0, 17, 1000, 100_000)


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """max|a−b| / max|b|."""
    return float((actual - expected).abs().max() / expected.abs().max())


def reference_model(name: str) -> tuple[dict[str, Any], ReferenceModel]:
    raw = relative_config(name, max_position_embeddings=131072)
    config = ModelConfig.from_dict(raw)
    model = ReferenceModel(config)
    model.load_state_dict(random_state(config))
    return raw, model.requires_grad_(False).eval()


def run_block(
    model: ReferenceModel, block: Block, x_BSD: Tensor, start: int, form: Any, taps: Taps
) -> Tensor:
    """A block's output for new tokens at positions start …, with nothing cached."""
    B, S, _ = x_BSD.shape
    tables = model.tables(torch.arange(start, start + S).expand(B, S), x_BSD.dtype)
    cache = LatentRows.empty(model.config, B, x_BSD.dtype, form)
    y: Tensor = block(x_BSD, *tables, causal_mask(S, 0, x_BSD.dtype), cache, taps)
    return y


@EACH
def test_every_block_equals_transformers(name: str) -> None:
    """Case 1: from position 17 on a wrong softmax scale would show. Expanded and absorbed."""
    raw, model = reference_model(name)
    for layer in range(model.config.num_hidden_layers):
        block = model.block(layer)
        published = published_layer(raw, layer, block.state_dict())
        assert published.self_attn.scaling == pytest.approx(model.config.softmax_scale, rel=1e-12)
        for start in STARTS:
            torch.manual_seed(start)
            x, taps = torch.randn(2, 5, model.config.hidden_size), Taps()
            positions = torch.arange(start, start + 5).expand(2, 5)
            expected = published(
                x,
                attention_mask=causal_mask(5, 0, x.dtype),
                position_embeddings=published_tables(raw, x, positions),
            )
            assert (
                relative_error(run_block(model, block, x, start, "expanded", taps), expected)
                <= 2e-6
            )
            assert (
                relative_error(run_block(model, block, x, start, "absorbed", Taps()), expected)
                <= 1e-5
            )
            if "experts" in taps:
                _, weights, experts = published.mlp.gate(taps["h"])
                assert_same_routing(
                    (taps["experts"], taps["expert_weights"]), by_token(experts, weights)
                )


def by_token(experts_MK: Tensor, weights_MK: Tensor) -> list[dict[int, float]]:
    pairs = zip(experts_MK.tolist(), weights_MK.tolist(), strict=True)
    return [dict(zip(experts, weights, strict=True)) for experts, weights in pairs]


def assert_same_routing(actual: tuple[Tensor, Tensor], expected: list[dict[int, float]]) -> None:
    """Experts as sets, and the weight of each."""
    for weights, expected_weights in zip(by_token(*actual), expected, strict=True):
        assert weights == pytest.approx(expected_weights, rel=1e-5, abs=0)


GATES: list[dict[str, Any]] = [
    {"name": "deepseek-v3"},
    {"name": "deepseek-v3", "norm_topk_prob": False},
    {"name": "deepseek-v3", "n_group": 8, "topk_group": 4, "num_experts_per_tok": 8},
    {"name": "deepseek-v3", "n_group": 2, "topk_group": 1},
    {"name": "moonlight"},
    {"name": "deepseek-v2-lite"},
    {"name": "deepseek-v2-lite", "norm_topk_prob": True, "routed_scaling_factor": 16.0},
    {"name": "deepseek-v2-lite", "routed_scaling_factor": 16.0},
    {"name": "deepseek-v2"},
    {"name": "deepseek-v2", "norm_topk_prob": True},
    {"name": "deepseek-v2", "n_group": 3, "topk_group": 1, "num_experts_per_tok": 4},
]


@pytest.mark.parametrize("changes", GATES, ids=lambda c: ", ".join(map(str, c.values())))
def test_gates_follow_their_rules(changes: dict[str, Any]) -> None:
    """Case 7: the config's function makes the scores, which are weights without the bias."""
    torch.manual_seed(0)
    changes = dict(changes)
    raw = relative_config(changes.pop("name"), **changes)
    gate = Gate(ModelConfig.from_dict(raw)).requires_grad_(False)
    gate.weight.copy_(3 * torch.randn(gate.weight.shape) / 160**0.5)
    if gate.e_score_correction_bias is not None:
        gate.e_score_correction_bias.copy_(torch.randn(raw["n_routed_experts"]) / 5)
    h = torch.randn(100, 160)
    expected = gate_by_hand(h, gate.weight, gate.e_score_correction_bias, raw)
    assert_same_routing(gate(h), expected)


@pytest.mark.parametrize("name", ["deepseek-v3", "deepseek-v2"])
def test_a_masked_group_is_never_chosen_from(name: str) -> None:
    """Case 5: with a bias of −2 every score for choosing is below 0, so a mask of 0 would win."""
    torch.manual_seed(0)
    raw = relative_config(name)
    gate = Gate(ModelConfig.from_dict(raw)).requires_grad_(False)
    gate.weight.copy_(torch.randn(gate.weight.shape) / 160**0.5)
    if gate.e_score_correction_bias is not None:
        gate.e_score_correction_bias.fill_(-2)
    h = torch.randn(200, 160)
    experts, weights = gate(h)
    size = raw["n_routed_experts"] // raw["n_group"]
    assert all(len(set(row)) <= raw["topk_group"] for row in (experts // size).tolist())
    assert_same_routing(
        (experts, weights), gate_by_hand(h, gate.weight, gate.e_score_correction_bias, raw)
    )


def test_a_gate_without_a_bias_has_none_to_load() -> None:
    config = ModelConfig.from_dict(relative_config("deepseek-v2-lite"))
    assert set(Gate(config).state_dict()) == {"weight"}
    with pytest.raises(RuntimeError, match="e_score_correction_bias"):
        Gate(config).load_state_dict(
            {"weight": torch.zeros(8, 160), "e_score_correction_bias": torch.zeros(8)}
        )


# Weights with which no token of the end-to-end golden is within the noise of 16 and 8 bits of
# another expert, or group of them: the chain would be right to choose that one, and its logits then
# differ.
SEEDS = {"deepseek-v3": 5, "moonlight": 4}


Built = Callable[[str, Precision], Path]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Checkpoint]:
    """A relative with random weights."""

    @functools.cache
    def open_checkpoint(name: str) -> Checkpoint:
        folder, raw = tmp_path_factory.mktemp(name), relative_config(name)
        return Checkpoint.open(written(folder, raw, SEEDS.get(name, 0)))

    return open_checkpoint


@pytest.fixture(scope="module")
def built(checkpoint: Callable[[str], Checkpoint]) -> Built:
    """A relative's graphs, weights and goldens."""
    return functools.cache(lambda name, precision: shared_build(checkpoint(name), precision))


# Quick: one relative in fp32, the one that differs most from K2 (a direct query, a softmax gate,
# 16-bit weights). deepseek-v2 is no preset's, so in fp32 alone.
QUICK = ("deepseek-v2-lite", "fp32")
BUILDS = [
    pytest.param(name, precision, marks=() if (name, precision) == QUICK else pytest.mark.slow)
    for name in RELATIVES
    for precision in PRECISIONS
    if precision == "fp32" or name != "deepseek-v2"
]
BUILT = pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if (name, "fp32") == QUICK else pytest.mark.slow)
        for name in RELATIVES
    ],
)


@pytest.mark.parametrize(("name", "precision"), BUILDS)
def test_graphs_blocks_and_chain_are_within_their_bars(
    built: Built, name: str, precision: Precision
) -> None:
    build = built(name, precision)
    chain = load_chain(build, threads=1)
    alone, whole = graph_parity(build, threads=1), runtime_parity(chain, build)
    first = f"{chain.config.first_k_dense_replace:03d}"
    cases = {"dense_000_decode", f"moe_{first}_chunk", f"experts_{first}_decode_0", "end_to_end"}
    assert {row.case for row in alone.rows + whole.rows} >= cases
    assert [row for row in alone.rows + whole.rows if not row.passed] == []
    assert alone.passed and whole.passed and alone.hints + whole.hints == []


@BUILT
def test_greedy_tokens_equal_transformers(
    built: Built, checkpoint: Callable[[str], Checkpoint], name: str
) -> None:
    """24 tokens behind a prompt of 9, in fp32, from packed weights through the graphs."""
    build, opened = built(name, "fp32"), checkpoint(name)
    published = published_model(opened.raw_config, opened.reference().state_dict())
    torch.manual_seed(0)
    prompt = torch.randint(0, 256, (1, 9))
    ids = prompt
    for _ in range(24):
        ids = torch.cat([ids, published(ids).logits[:, -1:].argmax(-1)], dim=1)
    scheduler = Scheduler(load_chain(build, threads=1), token_budget=4)
    ticket = scheduler.submit(Request(tuple(prompt[0].tolist()), 24))
    tokens = list(scheduler.run()[ticket].tokens)
    assert tokens == ids[0, 9:].tolist() and len(set(tokens)) > 4


@BUILT
def test_the_graphs_read_what_the_relatives_have(built: Built, name: str) -> None:
    spec = BuildSpec.load(built(name, "fp32"))
    c = spec.config
    weights = {t.name: t.dims for t in spec.graphs["moe"].weights}
    assert ("gate.bias" in weights) == (c.topk_method == "noaux_tc")
    heads, latent = c.num_attention_heads * c.qk_head_dim, c.cache_width
    if c.q_lora_rank is None:
        assert weights["attention.qkv.weight"] == (heads + latent, 160)
        assert not {"attention.qkv_a.weight", "attention.q_norm.weight"} & weights.keys()
    else:
        assert weights["attention.qkv_a.weight"] == (c.q_lora_rank + latent, 160)
        assert weights["attention.q_b.weight"] == (heads, c.q_lora_rank)
    assert weights["shared.gate_up.weight"] == (2 * 72 * c.n_shared_experts, 160)
