"""The configs that come along: the published files, what tells them apart, what follows."""

import hashlib
from typing import Any

import pytest
import torch

from export.reference.rope import inverse_frequencies
from graphs.budget.accounting import Account
from graphs.contract.config import PRESETS, ModelConfig, load_config, load_raw_config
from graphs.contract.quantization import FP8Blocks, Int4Groups

NAMES = (
    "k2",
    "k2-0905",
    "k2-thinking",
    "k2.5",
    "deepseek-v3",
    "deepseek-v3.1",
    "moonlight",
    "deepseek-v2-lite",
)
KIMI, DEEPSEEK = NAMES[:4], NAMES[4:6]
EACH = pytest.mark.parametrize("name", NAMES)

# SHA-256 of the published config.json; see graphs/contract/presets/README.md.
PUBLISHED = {
    "k2": "8c13ae1049df55f29b3bdcae69a562433f243ff70dac251d819ecad8dbdf7439",
    "k2-thinking": "666ee58fc3871ecc369a22bc8c100075c2ad24ccbe8b3e336fa5f726e6111c15",
    "k2.5": "acd5bb01a16f64b309599cd6ed196be056f613c99d6bc9300692b82cd10882f6",
    "deepseek-v3": "cbf0b95dc614de208a109bb5fd4e7eed11385e9c68411d2c17db5319443035d9",
    "deepseek-v2-lite": "f346286b0f1c8b044252fd54cb4fa78b9fab6472a6e8bebb9edfe03d414ea03d",
}


def test_these_are_the_presets() -> None:
    assert {path.stem for path in PRESETS.glob("*.json")} == set(NAMES)


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_preset_is_the_published_file_byte_for_byte(name: str) -> None:
    content = (PRESETS / f"{name}.json").read_bytes()
    assert hashlib.sha256(content).hexdigest() == PUBLISHED[name]


def test_the_others_differ_from_their_siblings_in_what_is_known_to_differ() -> None:
    k2, v3 = load_raw_config("k2"), load_raw_config("deepseek-v3")
    longer = {
        "max_position_embeddings": 262144,
        "rope_scaling": k2["rope_scaling"] | {"factor": 64},
    }
    assert load_raw_config("k2-0905") == k2 | longer
    powers = {"quantization_config": v3["quantization_config"] | {"scale_fmt": "ue8m0"}}
    assert load_raw_config("deepseek-v3.1") == v3 | powers | {"transformers_version": "4.44.2"}


# What a field is where the model is none of those named.
FIELDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "num_hidden_layers": (61, {"moonlight": 27, "deepseek-v2-lite": 27}),
    "first_k_dense_replace": (1, dict.fromkeys(DEEPSEEK, 3)),
    "hidden_size": (7168, {"moonlight": 2048, "deepseek-v2-lite": 2048}),
    "num_attention_heads": (
        64,
        dict.fromkeys(DEEPSEEK, 128) | {"moonlight": 16, "deepseek-v2-lite": 16},
    ),
    "q_lora_rank": (1536, {"moonlight": None, "deepseek-v2-lite": None}),
    "kv_lora_rank": (512, {}),
    "qk_nope_head_dim": (128, {}),
    "qk_rope_head_dim": (64, {}),
    "v_head_dim": (128, {}),
    "intermediate_size": (18432, {"moonlight": 11264, "deepseek-v2-lite": 10944}),
    "moe_intermediate_size": (2048, {"moonlight": 1408, "deepseek-v2-lite": 1408}),
    "n_routed_experts": (
        384,
        dict.fromkeys(DEEPSEEK, 256) | {"moonlight": 64, "deepseek-v2-lite": 64},
    ),
    "n_shared_experts": (1, {"moonlight": 2, "deepseek-v2-lite": 2}),
    "num_experts_per_tok": (8, {"moonlight": 6, "deepseek-v2-lite": 6}),
    "n_group": (1, dict.fromkeys(DEEPSEEK, 8)),
    "topk_group": (1, dict.fromkeys(DEEPSEEK, 4)),
    "topk_method": ("noaux_tc", {"deepseek-v2-lite": "greedy"}),
    "scoring_func": ("sigmoid", {"deepseek-v2-lite": "softmax"}),
    "has_gate_bias": (True, {"deepseek-v2-lite": False}),
    "group_score": ("top2_sum", {"deepseek-v2-lite": None}),
    "norm_topk_prob": (True, {"deepseek-v2-lite": False}),
    "expert_scaling": (
        2.827,
        dict.fromkeys(DEEPSEEK, 2.5) | {"moonlight": 2.446, "deepseek-v2-lite": 1.0},
    ),
    "rms_norm_eps": (1e-6, {"k2-thinking": 1e-5, "k2.5": 1e-5, "moonlight": 1e-5}),
    "max_position_embeddings": (
        262144,
        {"k2": 131072, "moonlight": 8192} | dict.fromkeys((*DEEPSEEK, "deepseek-v2-lite"), 163840),
    ),
    "vocab_size": (163840, dict.fromkeys(DEEPSEEK, 129280) | {"deepseek-v2-lite": 102400}),
    "bos_token_id": (163584, dict.fromkeys(DEEPSEEK, 0) | {"deepseek-v2-lite": 100000}),
    "eos_token_id": (
        (163585,),
        {"k2-thinking": (163586,), "moonlight": (163586,), "deepseek-v2-lite": (100001,)}
        | dict.fromkeys(DEEPSEEK, (1,)),
    ),
    "num_nextn_predict_layers": (0, dict.fromkeys(DEEPSEEK, 1)),
    "cache_width": (576, {}),
    "shared_intermediate_size": (2048, {"moonlight": 2816, "deepseek-v2-lite": 2816}),
}


@pytest.mark.parametrize("field", FIELDS)
def test_what_tells_the_models_apart(field: str) -> None:
    usual, others = FIELDS[field]
    values = {name: getattr(load_config(name), field) for name in NAMES}
    assert values == {name: others.get(name, usual) for name in NAMES}


def test_the_quantisation_of_each() -> None:
    kinds = {name: load_config(name).quantization for name in NAMES}
    for name in ("k2", "k2-0905", *DEEPSEEK):
        assert kinds.pop(name) == FP8Blocks((128, 128))
    for name in ("k2-thinking", "k2.5"):
        int4 = kinds.pop(name)
        assert isinstance(int4, Int4Groups) and int4.group_size == 32
        assert int4.targeted("model.layers.7.mlp.experts.3.up_proj")
        assert not int4.targeted("model.layers.7.mlp.shared_experts.up_proj")
    assert kinds == {"moonlight": None, "deepseek-v2-lite": None}


def test_k2_5_is_nested_and_its_vision_tower_is_left_alone() -> None:
    raw = load_raw_config("k2.5")
    assert raw["model_type"] == "kimi_k25" and "vision_config" in raw
    assert raw["text_config"]["quantization_config"]["quant_method"] == "compressed-tensors"
    assert load_config("k2.5") == ModelConfig.from_dict(raw["text_config"])


# Theta, factor, beta_fast, mscale and mscale_all_dim; last pair kept, first one divided by factor.
ROPE: dict[str, tuple[tuple[float, ...], tuple[int, int]]] = {
    "k2": ((5e4, 32, 1, 1, 1), (19, 20)),
    "k2-0905": ((5e4, 64, 1, 1, 1), (19, 20)),
    "k2-thinking": ((5e4, 64, 1, 1, 1), (19, 20)),
    "k2.5": ((5e4, 64, 32, 1, 1), (8, 20)),
    "deepseek-v3": ((1e4, 40, 32, 1, 1), (10, 23)),
    "deepseek-v3.1": ((1e4, 40, 32, 1, 1), (10, 23)),
    "moonlight": ((5e4, 1, 32, 1, 0), (31, 32)),
    "deepseek-v2-lite": ((1e4, 40, 32, 0.707, 0.707), (10, 23)),
}


@EACH
def test_rope_settings_and_the_pairs_that_yarn_keeps_and_divides(name: str) -> None:
    rope, (settings, (low, high)) = load_config(name).rope, ROPE[name]
    values = (rope.rope_theta, rope.factor, rope.beta_fast, rope.mscale, rope.mscale_all_dim)
    assert values == settings and rope.beta_slow == 1
    assert rope.original_max_position_embeddings == 4096 and rope.table_multiplier == 1.0
    plain = rope.rope_theta ** -(torch.arange(0, 64, 2, dtype=torch.float64) / 64)
    share = inverse_frequencies(rope, 64).double() / plain
    kept, divided = share > 1 - 1e-6, share < (1 + 1e-6) / rope.factor
    if rope.factor == 1:
        assert kept.all()
    else:
        assert kept.tolist() == [pair <= low for pair in range(32)]
        assert divided.tolist() == [pair >= high for pair in range(32)]


SOFTMAX_SCALES = {"k2": 0.130860800, "moonlight": 192**-0.5, "deepseek-v2-lite": 0.114721387}


@EACH
def test_softmax_scales(name: str) -> None:
    """Case 1: mscale² is in all of them, though cos and sin are multiplied by 1."""
    usual = 0.135233779 if name in DEEPSEEK else 0.144679626
    assert load_config(name).softmax_scale == pytest.approx(
        SOFTMAX_SCALES.get(name, usual), abs=5e-10
    )


PARAMETERS = dict.fromkeys(KIMI, 1_026_408_232_448) | dict.fromkeys(DEEPSEEK, 671_026_419_200)
PARAMETERS |= {"moonlight": 15_960_110_208, "deepseek-v2-lite": 15_706_484_224}


@EACH
def test_parameters(name: str) -> None:
    """Without DeepSeek-V3's layer for predicting a second token, which is not run."""
    assert Account.from_config(load_config(name)).model.parameters == PARAMETERS[name]


@pytest.mark.parametrize("name", ["k2-thinking", "k2.5"])
def test_int4_checkpoint_bytes(name: str) -> None:
    account = Account.from_config(load_config(name))
    experts = [c for c in account.blocks["moe"] if c.name == "routed experts"]
    parts = (experts, account.blocks["moe"], account.blocks["dense"])
    sizes = [account.figures(part).int4_checkpoint_bytes for part in parts]
    assert sizes == [384 * 24_772_632, 9_808_554_496, 995_000_320]
    assert account.model.int4_checkpoint_bytes == 594_205_904_896
    assert account.model.fp8_checkpoint_bytes is None


def test_what_is_not_quantised_has_neither_size() -> None:
    model = Account.from_config(load_config("moonlight")).model
    assert (model.fp8_checkpoint_bytes, model.int4_checkpoint_bytes) == (None, None)
    assert model.bf16_checkpoint_bytes == 2 * PARAMETERS["moonlight"] + 26 * 64 * 2
