"""Figures for Kimi K2 against the published ones, and against the tensors that exist."""

import json
import math
from collections.abc import Iterable
from typing import Any

import pytest
from torch._subclasses.fake_tensor import FakeTensorMode
from typer.testing import CliRunner

from export.checkpoint.tensor_names import expected_tensors, is_linear, is_routed, layer_tensors
from export.engine.blocks import DenseBlock, Experts, Head, MoEBlock
from export.engine.layers import LinearForm
from graphs.__main__ import app
from graphs.budget.accounting import Account
from graphs.contract.config import BlockType, ModelConfig, load_raw_config
from graphs.contract.quantization import FP8Blocks, Int4Groups
from graphs.contract.spec import EXPERT_SLOTS, PRECISIONS, Precision

K2 = load_raw_config("k2")
# Sizes that fill no block of 128 × 128: the last block of every matrix is ragged.
RAGGED = K2 | {
    "hidden_size": 200,
    "num_hidden_layers": 4,
    "num_attention_heads": 3,
    "q_lora_rank": 72,
    "kv_lora_rank": 168,
    "qk_nope_head_dim": 56,
    "qk_rope_head_dim": 24,
    "v_head_dim": 40,
    "intermediate_size": 136,
    "moe_intermediate_size": 48,
    "n_routed_experts": 6,
    "n_shared_experts": 2,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 2,
    "vocab_size": 163840,
    "num_key_value_heads": 3,
}
# Direct queries, no gate bias, 16 bits; and routed experts in 4 bits, nested.
DIRECT = {k: v for k, v in RAGGED.items() if k != "quantization_config"} | {
    "q_lora_rank": None,
    "scoring_func": "softmax",
    "topk_method": "greedy",
}
INT4 = RAGGED | {"quantization_config": load_raw_config("k2-thinking")["quantization_config"]}
CONFIGS = pytest.mark.parametrize(
    "raw",
    [K2, RAGGED, DIRECT, load_raw_config("k2-thinking"), INT4],
    ids=["k2", "ragged", "direct", "int4", "ragged int4"],
)
BLOCKS: tuple[BlockType, ...] = ("dense", "moe")


@pytest.fixture(scope="module")
def figures() -> dict[str, Any]:
    """The output of `python -m graphs describe k2 --json`."""
    result = CliRunner().invoke(app, ["describe", "k2", "--json"])
    assert result.exit_code == 0
    content: dict[str, Any] = json.loads(result.stdout)
    return content


def test_k2_parameters(figures: dict[str, Any]) -> None:
    dense, moe = figures["blocks"]["dense"], figures["blocks"]["moe"]
    for block in (dense, moe):
        assert block["attention"]["parameters"] == 101_124_096
        assert block["components"]["output projection"]["parameters"] == 58_720_256
        assert block["components"]["key–value compression"]["parameters"] == 7168 * 512 + 512
        assert block["components"]["shared rope key"]["parameters"] == 458_752
    assert dense["components"]["SwiGLU MLP"]["parameters"] == 396_361_728
    assert dense["block"]["parameters"] == 497_500_160
    assert (dense["layers"], moe["layers"]) == (1, 60)
    assert moe["parameters_in_all_layers"]["output projection"] == 3_523_215_360
    assert moe["components"]["routed experts"]["parameters"] == 16_911_433_728
    assert moe["block"]["parameters"] == 17_059_365_248
    assert figures["model"]["parameters"] == 1_026_408_232_448


def test_k2_active_parameters_and_cache(figures: dict[str, Any]) -> None:
    assert figures["blocks"]["dense"]["active_parameters"] == 497_500_160
    assert figures["blocks"]["moe"]["active_parameters"] == 500_253_056
    assert figures["active_parameters_per_token"] == 31_687_095_808
    assert figures["cache_values_per_position_and_layer"] == {"latent": 576, "per_head": 20_480}


def test_k2_checkpoint_bytes(figures: dict[str, Any]) -> None:
    dense, moe = figures["blocks"]["dense"]["block"], figures["blocks"]["moe"]["block"]
    assert dense["fp8_checkpoint_bytes"] == 497_638_112
    assert moe["fp8_checkpoint_bytes"] == 17_066_299_616
    assert dense["bf16_checkpoint_bytes"] == 995_000_320
    assert moe["bf16_checkpoint_bytes"] == 34_118_731_264


@CONFIGS
@pytest.mark.parametrize("kind", BLOCKS)
def test_a_block_is_the_tensors_of_its_checkpoint(raw: dict[str, Any], kind: BlockType) -> None:
    config = ModelConfig.from_dict(raw)
    account = Account.from_config(config)
    layer = 0 if kind == "dense" else config.first_k_dense_replace
    tensors = layer_tensors(config, layer)
    block = account.figures(account.blocks[kind])
    assert block.parameters == sum(map(math.prod, tensors.values()))
    assert block.bf16_checkpoint_bytes == sum(bf16_bytes(*item) for item in tensors.items())
    fp8 = sum(fp8_bytes(*item) for item in tensors.items())
    int4 = sum(int4_bytes(*item) for item in tensors.items())
    expected = {FP8Blocks: (fp8, None), Int4Groups: (None, int4)}
    assert (block.fp8_checkpoint_bytes, block.int4_checkpoint_bytes) == expected.get(
        type(config.quantization), (None, None)
    )


def bf16_bytes(name: str, shape: tuple[int, ...]) -> int:
    return math.prod(shape) * (4 if name.endswith("bias") else 2)


def fp8_bytes(name: str, shape: tuple[int, ...]) -> int:
    if not is_linear(name):
        return bf16_bytes(name, shape)
    return math.prod(shape) + 4 * math.ceil(shape[0] / 128) * math.ceil(shape[1] / 128)


def int4_bytes(name: str, shape: tuple[int, ...]) -> int:
    """Words of 8 codes, a bf16 scale for every 32 inputs, the shape as two words."""
    if not is_routed(name):
        return bf16_bytes(name, shape)
    rows, columns = shape
    return rows * (4 * math.ceil(columns / 8) + 2 * math.ceil(columns / 32)) + 8


def test_the_model_is_the_tensors_of_its_checkpoint() -> None:
    config = ModelConfig.from_dict(RAGGED)
    total = sum(map(math.prod, expected_tensors(config).values()))
    assert Account.from_config(config).model.parameters == total


@CONFIGS
@pytest.mark.parametrize("precision", PRECISIONS)
def test_packed_bytes_are_those_the_graphs_read(raw: dict[str, Any], precision: Precision) -> None:
    config, form = ModelConfig.from_dict(raw), LinearForm.from_precision(precision)
    with FakeTensorMode():
        dense, moe, head = (
            weight_bytes(m(config, form).parameters()) for m in (DenseBlock, MoEBlock, Head)
        )
        expert = weight_bytes(Experts(config, form).parameters()) // EXPERT_SLOTS
    account = Account.from_config(config)
    expected = {"dense": dense, "moe": moe + expert * config.n_routed_experts}
    for kind, components in account.blocks.items():
        assert account.figures(components).packed_bytes[precision] == expected[kind]
    assert account.figures(account.ends[1:]).packed_bytes[precision] == head


def weight_bytes(parameters: Iterable[Any]) -> int:
    return sum(p.numel() * p.element_size() for p in parameters)


@pytest.mark.parametrize(
    ("preset", "columns"),
    [("k2", {"bf16", "FP8"}), ("k2.5", {"bf16", "INT4"}), ("moonlight", {"bf16"})],
)
def test_the_table_has_a_column_for_the_configs_own_checkpoint(
    preset: str, columns: set[str]
) -> None:
    result = CliRunner().invoke(app, ["describe", preset])
    assert result.exit_code == 0
    head = next(line for line in result.stdout.splitlines() if "parameters" in line)
    assert {kind for kind in ("bf16", "FP8", "INT4") if f"{kind} checkpoint" in head} == columns
    assert "fp8 packed" in head


def test_the_table_names_the_totals() -> None:
    result = CliRunner().invoke(app, ["describe", "k2"])
    assert result.exit_code == 0
    for figure in ("497,500,160", "17,059,365,248", "1,026,408,232,448", "3,523,215,360", "20,480"):
        assert figure in result.stdout
