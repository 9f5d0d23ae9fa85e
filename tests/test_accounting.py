"""Figures for Kimi K2 against the published ones, and against the tensors that exist."""

import json
import math
from collections.abc import Iterable
from typing import Any

import pytest
from torch._subclasses.fake_tensor import FakeTensorMode
from typer.testing import CliRunner

from export.checkpoint import expected_tensors, is_quantised, layer_tensors
from export.exportable import DenseBlock, Experts, Form, Head, MoEBlock
from graphs.__main__ import app
from graphs.accounting import Account
from graphs.config import BlockType, ModelConfig, load_raw_config
from graphs.spec import PRECISIONS, SLOTS, Precision

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
CONFIGS = pytest.mark.parametrize("raw", [K2, RAGGED], ids=["k2", "ragged"])
BLOCKS: tuple[BlockType, ...] = ("dense", "moe")


@pytest.fixture(scope="module")
def figures() -> dict[str, Any]:
    """What `python -m graphs describe k2 --json` prints."""
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
    account = Account.of(config)
    layer = 0 if kind == "dense" else config.first_k_dense_replace
    tensors = layer_tensors(config, layer)
    block = account.figures(account.blocks[kind])
    assert block.parameters == sum(map(math.prod, tensors.values()))
    assert block.fp8_checkpoint_bytes == sum(fp8_bytes(*item) for item in tensors.items())


def fp8_bytes(name: str, shape: tuple[int, ...]) -> int:
    if not is_quantised(name):
        return math.prod(shape) * (4 if name.endswith("bias") else 2)
    return math.prod(shape) + 4 * math.ceil(shape[0] / 128) * math.ceil(shape[1] / 128)


def test_the_model_is_the_tensors_of_its_checkpoint() -> None:
    config = ModelConfig.from_dict(RAGGED)
    total = sum(map(math.prod, expected_tensors(config).values()))
    assert Account.of(config).model.parameters == total


@CONFIGS
@pytest.mark.parametrize("precision", PRECISIONS)
def test_packed_bytes_are_those_the_graphs_read(raw: dict[str, Any], precision: Precision) -> None:
    config, form = ModelConfig.from_dict(raw), Form.of(precision)
    with FakeTensorMode():
        dense, moe, head = (
            weight_bytes(m(config, form).parameters()) for m in (DenseBlock, MoEBlock, Head)
        )
        expert = weight_bytes(Experts(config, form).parameters()) // SLOTS
    account = Account.of(config)
    expected = {"dense": dense, "moe": moe + expert * config.n_routed_experts}
    for kind, components in account.blocks.items():
        assert account.figures(components).packed_bytes[precision] == expected[kind]
    assert account.figures(account.ends[1:]).packed_bytes[precision] == head


def weight_bytes(parameters: Iterable[Any]) -> int:
    return sum(p.numel() * p.element_size() for p in parameters)


def test_a_16_bit_checkpoint_has_no_fp8_bytes() -> None:
    raw = {key: value for key, value in K2.items() if key != "quantization_config"}
    account = Account.of(ModelConfig.from_dict(raw))
    assert account.model.fp8_checkpoint_bytes is None


def test_the_table_names_the_totals() -> None:
    result = CliRunner().invoke(app, ["describe", "k2"])
    assert result.exit_code == 0
    for figure in ("497,500,160", "17,059,365,248", "1,026,408,232,448", "3,523,215,360", "20,480"):
        assert figure in result.stdout
