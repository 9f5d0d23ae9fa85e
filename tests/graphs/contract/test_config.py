"""The settings of a config.json, in either form of its rope settings, and every refusal."""

import copy
import dataclasses
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

from graphs.contract.config import ModelConfig, load_config, load_raw_config
from graphs.contract.quantization import FP8Blocks, Int4Groups
from graphs.contract.rope_config import ConfigError
from tests.support.helpers import INT4, multimodal, tiny_config

YARN = tiny_config()["rope_scaling"]
FP8 = tiny_config()["quantization_config"]


def new_form(**changes: Any) -> dict[str, Any]:
    """The tiny config with its rope settings in `rope_parameters`."""
    raw = tiny_config(**changes)
    scaling = raw.pop("rope_scaling")
    kind = {"rope_type": scaling.pop("type"), "rope_theta": raw.pop("rope_theta")}
    return raw | {"rope_parameters": scaling | kind}


def test_the_k2_preset_has_the_published_values() -> None:
    config = load_config("k2")
    assert (config.hidden_size, config.num_hidden_layers, config.num_attention_heads) == (
        7168,
        61,
        64,
    )
    assert (config.n_routed_experts, config.num_experts_per_tok) == (384, 8)
    assert config.qk_head_dim == 192
    assert config.cache_width == 576
    assert config.shared_intermediate_size == 2048
    assert (config.count("dense"), config.count("moe")) == (1, 60)
    assert [config.block_type(i) for i in (0, 1, 60)] == ["dense", "moe", "moe"]
    assert config.eos_token_id == (163585,)
    assert config.weight_block_size == (128, 128)
    assert (config.rope.rope_theta, config.rope.factor) == (50000.0, 32.0)
    assert (config.rope.beta_fast, config.rope.beta_slow) == (1.0, 1.0)
    assert config.softmax_scale == pytest.approx(0.130860800, abs=5e-10)
    assert config.rope.table_multiplier == 1.0


def test_both_rope_forms_are_one_config() -> None:
    """Case 3."""
    expected = ModelConfig.from_dict(tiny_config())
    assert ModelConfig.from_dict(new_form()) == expected
    assert ModelConfig.from_dict(tiny_config(rope_scaling=YARN | {"rope_type": "yarn"})) == expected
    assert expected.rope.rope_theta == 50000.0


def test_rope_without_scaling_is_the_same_in_every_form() -> None:
    default = {"rope_type": "default", "rope_theta": 50000.0}
    forms = [
        tiny_config(rope_scaling=None),
        tiny_config(rope_scaling={"type": "default"}),
        tiny_config(rope_scaling=None, rope_theta=None, rope_parameters=default),
    ]
    first, *others = [ModelConfig.from_dict(raw) for raw in forms]
    assert all(other == first for other in others)
    assert first.rope.softmax_multiplier == first.rope.table_multiplier == 1.0


def test_mscale_reaches_only_what_it_should() -> None:
    """cos and sin carry the ratio of the two mscales, the softmax mscale_all_dim alone, squared."""
    rope = ModelConfig.from_dict(tiny_config(rope_scaling=YARN | {"mscale_all_dim": 0.5})).rope
    whole, half = 0.1 * math.log(32) + 1, 0.05 * math.log(32) + 1
    assert rope.table_multiplier == pytest.approx(whole / half, rel=1e-12)
    assert rope.softmax_multiplier == pytest.approx(half**2, rel=1e-12)
    absent = {k: v for k, v in YARN.items() if k not in ("mscale", "mscale_all_dim")}
    rope = ModelConfig.from_dict(tiny_config(rope_scaling=absent)).rope
    assert rope.table_multiplier == pytest.approx(whole, rel=1e-12)
    assert rope.softmax_multiplier == 1.0


@pytest.mark.parametrize("raw", [tiny_config(), new_form()], ids=["old form", "new form"])
def test_a_theta_that_is_nowhere_is_an_error(raw: dict[str, Any]) -> None:
    """Case 3: never a silent 10000."""
    raw = copy.deepcopy(raw)
    raw.pop("rope_theta", None)
    raw.get("rope_parameters", {}).pop("rope_theta", None)
    with pytest.raises(ConfigError, match=r"^rope_theta: missing"):
        ModelConfig.from_dict(raw)


NAN, INFINITY = math.nan, math.inf

# field, value, what the error says is expected
REFUSED: list[tuple[str, Any, str]] = [
    ("use_sliding_window", True, "not a known key"),
    ("scoring_func", "softmax", "'sigmoid' with topk_method 'noaux_tc'"),
    ("scoring_func", "sqrtsoftplus", "'sigmoid'"),
    ("scoring_func", None, "'sigmoid'"),
    ("topk_method", "aux_tc", "'noaux_tc', 'greedy' or 'group_limited_greedy'"),
    ("topk_method", None, "'noaux_tc'"),
    ("hidden_act", "gelu", "'silu'"),
    ("tie_word_embeddings", True, "False"),
    ("attention_bias", True, "False"),
    ("attention_bias", 0, "False"),
    ("rope_interleave", False, "True"),
    ("moe_layer_freq", 2, "1"),
    ("moe_layer_freq", True, "1"),
    ("num_nextn_predict_layers", -1, "a whole number of at least 0"),
    ("num_nextn_predict_layers", None, "a whole number of at least 0"),
    ("q_lora_rank", 0, "a whole number of at least 1"),
    ("q_lora_rank", "null", "a whole number of at least 1"),
    ("kv_lora_rank", None, "a whole number of at least 1"),
    ("hidden_size", "160", "a whole number of at least 1"),
    ("hidden_size", 160.0, "a whole number of at least 1"),
    ("hidden_size", True, "a whole number of at least 1"),
    ("n_shared_experts", 0, "a whole number of at least 1"),
    ("vocab_size", -258, "a whole number of at least 1"),
    ("first_k_dense_replace", -1, "a whole number of at least 0"),
    ("first_k_dense_replace", False, "a whole number of at least 0"),
    ("first_k_dense_replace", 4, "num_hidden_layers (3)"),
    ("rms_norm_eps", NAN, "a number above 0"),
    ("rms_norm_eps", INFINITY, "a number above 0"),
    ("rms_norm_eps", "1e-6", "a number above 0"),
    ("routed_scaling_factor", 0, "a number above 0"),
    ("routed_scaling_factor", True, "a number above 0"),
    ("norm_topk_prob", 1, "true or false"),
    ("num_key_value_heads", 1, "num_attention_heads (3)"),
    ("num_key_value_heads", 0, "num_attention_heads (3)"),
    ("qk_rope_head_dim", 15, "even"),
    ("n_group", 3, "a divisor of n_routed_experts (8)"),
    ("n_group", 8, "groups of at least 2 experts"),
    ("num_experts_per_tok", 9, "at most 8"),
    ("num_experts_per_tok", 1, "at least 2 with norm_topk_prob"),
    ("is_decoder", True, "False"),
    ("pruned_heads", {"0": [1]}, "{}"),
    ("chunk_size_feed_forward", 64, "0"),
    ("quantization_config", "fp8", "an object"),
    ("rope_scaling", "yarn", "an object"),
]


@pytest.mark.parametrize(("field", "value", "expected"), REFUSED, ids=lambda v: repr(v))
def test_a_refusal_names_field_value_and_what_is_expected(
    field: str, value: Any, expected: str
) -> None:
    with pytest.raises(ConfigError) as error:
        ModelConfig.from_dict(tiny_config(**{field: value}))
    assert str(error.value).startswith(f"{field}: ")
    assert expected in str(error.value) and repr(value) in str(error.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"topk_group": 2}, r"^n_group: .* at least topk_group \(2\), got 1"),
        ({"topk_method": "greedy"}, "^scoring_func: expected 'softmax' with .*, got 'sigmoid'"),
        (
            {"topk_method": "greedy", "scoring_func": "softmax", "n_group": 2},
            "^n_group: expected 1 with topk_method 'greedy', .*, got 2",
        ),
        (
            {"n_group": 4, "num_experts_per_tok": 3},
            "^num_experts_per_tok: expected at most 2, .*, got 3",
        ),
        ({"bos_token_id": 258}, r"bos_token_id.*: expected ids below vocab_size \(258\), got 258"),
        ({"eos_token_id": []}, r"eos_token_id: expected at least one token id, got \[\]"),
        (
            {"rope_parameters": YARN | {"rope_type": "yarn", "rope_theta": 1e4}},
            r"^rope_theta: .* got 50000.0 at the top level and 10000.0 in rope_parameters",
        ),
        (
            {"eos_token_id": [257, True]},
            r"eos_token_id: expected ids below vocab_size \(258\), got True",
        ),
    ],
)
def test_fields_that_contradict_each_other_are_refused(
    changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        ModelConfig.from_dict(tiny_config(**changes))


REFUSED_ROPE: list[tuple[str, Any, str]] = [
    ("type", "linear", "'default' or 'yarn'"),
    ("rope_type", "dynamic", "'default' or 'yarn'"),
    ("attention_factor", 1.5, "not a known key"),
    ("factor", 0.5, "a number of at least 1"),
    ("factor", NAN, "a number"),
    ("factor", True, "a number"),
    ("factor", "32", "a number"),
    ("beta_fast", 0, "a number above 0"),
    ("beta_slow", -1.0, "a number"),
    ("mscale", INFINITY, "a number"),
    ("mscale_all_dim", -0.5, "a number"),
    ("original_max_position_embeddings", 0, "a number of at least 1"),
    ("rope_theta", 1, "a number above 1"),
    ("rope_theta", NAN, "a number"),
]


@pytest.mark.parametrize(("field", "value", "expected"), REFUSED_ROPE, ids=lambda v: repr(v))
def test_a_rope_refusal_names_field_value_and_what_is_expected(
    field: str, value: Any, expected: str
) -> None:
    with pytest.raises(ConfigError, match=r"^rope_scaling\.") as error:
        ModelConfig.from_dict(tiny_config(rope_scaling=YARN | {field: value}))
    for part in (field, repr(value), expected):
        assert part in str(error.value)


@pytest.mark.parametrize("field", ["factor", "original_max_position_embeddings"])
def test_yarn_needs_its_factor_and_original_length(field: str) -> None:
    scaling = {k: v for k, v in YARN.items() if k != field}
    with pytest.raises(ConfigError, match=rf"^rope_scaling\.{field}: missing"):
        ModelConfig.from_dict(tiny_config(rope_scaling=scaling))


REFUSED_QUANTISATION: list[tuple[str, Any, str]] = [
    ("quant_method", "awq", "'fp8' or 'compressed-tensors'"),
    ("quant_method", None, "'fp8' or 'compressed-tensors'"),
    ("fmt", "e5m2", "'e4m3'"),
    ("scale_fmt", "float", "'ue8m0'"),
    ("activation_scheme", "static", "'dynamic'"),
    ("weight_block_size", None, "two whole numbers"),
    ("weight_block_size", [128], "two whole numbers"),
    ("weight_block_size", [128, True], "two whole numbers"),
    ("weight_block_size", [128, 0], "sizes above 0"),
    ("modules_to_not_convert", ["lm_head"], "[]"),
    ("ignored_layers", [], "not a known key"),
]


@pytest.mark.parametrize(
    ("field", "value", "expected"), REFUSED_QUANTISATION, ids=lambda v: repr(v)
)
def test_a_quantisation_refusal_names_field_value_and_what_is_expected(
    field: str, value: Any, expected: str
) -> None:
    with pytest.raises(ConfigError) as error:
        ModelConfig.from_dict(tiny_config(quantization_config=FP8 | {field: value}))
    assert str(error.value).startswith(f"quantization_config.{field}: ")
    assert expected in str(error.value) and repr(value) in str(error.value)


def int4(path: str = "", value: Any = None) -> dict[str, Any]:
    """The INT4 quantisation with one value changed, named by keys with dots in between."""
    raw = copy.deepcopy(INT4)
    *parents, last = path.split(".") if path else [""]
    owner = raw
    for key in parents:
        owner = owner[key]
    if path:
        owner[last] = value
    return raw


def test_each_published_quantisation_is_read() -> None:
    def read(quantization: dict[str, Any] | None) -> Any:
        return ModelConfig.from_dict(tiny_config(quantization_config=quantization)).quantization

    assert read(FP8) == read(FP8 | {"scale_fmt": "ue8m0"}) == FP8Blocks((128, 128))
    assert read(None) is None
    assert read(INT4) == Int4Groups(32, tuple(INT4["ignore"]))
    assert ModelConfig.from_dict(tiny_config()).weight_block_size == (128, 128)
    assert ModelConfig.from_dict(tiny_config(quantization_config=INT4)).weight_block_size is None


W = "config_groups.group_0.weights"
REFUSED_INT4: list[tuple[str, Any, str]] = [
    ("format", "nvfp4-pack-quantized", "'pack-quantized'"),
    ("quantization_status", "frozen", "'compressed'"),
    ("kv_cache_scheme", {"num_bits": 8}, "null"),
    ("sparsity_config", {"format": "sparse-24-bitmask"}, "{}"),
    ("recipe", "", "not a known key"),
    ("config_groups", None, "an object"),
    ("config_groups.group_0", [], "an object"),
    ("config_groups.group_0.targets", ["re:.*experts.*"], "['Linear']"),
    ("config_groups.group_0.input_activations", {"num_bits": 8}, "null"),
    ("config_groups.group_0.format", "float-quantized", "'pack-quantized'"),
    ("config_groups.group_0.targets_kind", 1, "not a known key"),
    (W, None, "an object"),
    (f"{W}.num_bits", 8, "4"),
    (f"{W}.num_bits", 4.0, "4"),
    (f"{W}.type", "float", "'int'"),
    (f"{W}.symmetric", False, "True"),
    (f"{W}.symmetric", 1, "True"),
    (f"{W}.strategy", "channel", "'group'"),
    (f"{W}.dynamic", True, "False"),
    (f"{W}.actorder", "weight", "null"),
    (f"{W}.group_size", None, "a whole number of at least 1"),
    (f"{W}.group_size", -1, "a whole number of at least 1"),
    (f"{W}.zero_point", 8, "not a known key"),
    ("ignore", None, "a list of module names"),
    ("ignore", "lm_head", "a list of module names"),
    ("ignore", ["lm_head", 3], "a list of module names"),
]


@pytest.mark.parametrize(("path", "value", "expected"), REFUSED_INT4, ids=lambda v: repr(v))
def test_an_int4_refusal_names_field_value_and_what_is_expected(
    path: str, value: Any, expected: str
) -> None:
    with pytest.raises(ConfigError) as error:
        ModelConfig.from_dict(tiny_config(quantization_config=int4(path, value)))
    assert str(error.value).startswith(f"quantization_config.{path}: ")
    assert expected in str(error.value) and repr(value) in str(error.value)


def test_two_groups_are_mixed_methods_and_refused() -> None:
    group = INT4["config_groups"]["group_0"]
    mixed = int4("config_groups", {"group_0": group, "group_1": group})
    with pytest.raises(
        ConfigError, match=r"config_groups: expected one group, got \['group_0', 'group_1'\]"
    ):
        ModelConfig.from_dict(tiny_config(quantization_config=mixed))


@pytest.mark.parametrize(
    ("rules", "module"),
    [
        ([], "lm_head is quantised"),
        (["lm_head"], "model.layers.0.self_attn.q_a_proj is quantised"),
        (["lm_head", "re:.*self_attn.*"], "model.layers.0.mlp.gate_proj is quantised"),
        ([r for r in INT4["ignore"] if "shared" not in r], "shared_experts.gate_proj is quantised"),
        ([*INT4["ignore"], "re:.*experts.*"], "experts.0.gate_proj is not quantised"),
        ([*INT4["ignore"], "re:.*layers.2.mlp.*"], "layers.2.mlp.experts.0.gate_proj is not"),
        ([*INT4["ignore"], "model.layers.1.mlp.experts.7.down_proj"], "experts.7.down_proj is not"),
        (["lm_head", "re:self_attn"], "model.layers.0.self_attn.q_a_proj is quantised"),
    ],
)
def test_rules_that_quantise_other_modules_than_routed_experts_are_refused(
    rules: list[str], module: str
) -> None:
    """A rule matches the start of a name, as a regular expression, or all of it."""
    with pytest.raises(ConfigError, match=rf"^quantization_config\.ignore: .*{module}"):
        ModelConfig.from_dict(tiny_config(quantization_config=int4("ignore", rules)))


def test_rules_may_be_written_for_names_with_and_without_the_prefix() -> None:
    rules = [*INT4["ignore"][1:], "language_model.lm_head", "re:vision_tower.*"]
    ModelConfig.from_dict(tiny_config(quantization_config=int4("ignore", rules)))


def test_a_rule_that_is_no_regular_expression_is_named() -> None:
    rules = [*INT4["ignore"], "re:*.mlp"]
    with pytest.raises(ConfigError, match=r"^quantization_config\.ignore: .* got 're:\*\.mlp':"):
        ModelConfig.from_dict(tiny_config(quantization_config=int4("ignore", rules)))


def test_a_nested_text_config_is_the_model() -> None:
    """A key that both levels may hold counts where either holds it."""
    flat = tiny_config(quantization_config=INT4)
    expected = ModelConfig.from_dict(flat)
    assert ModelConfig.from_dict(multimodal(flat)) == expected
    moved = {k: flat[k] for k in ("quantization_config", "bos_token_id", "eos_token_id")}
    inner = {k: v for k, v in flat.items() if k not in moved}
    assert ModelConfig.from_dict(multimodal(inner) | moved) == expected
    assert ModelConfig.from_dict(multimodal(flat) | moved) == expected


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"quantization_config": FP8}, r"^quantization_config: .* top level .* in text_config"),
        ({"eos_token_id": 3}, "^eos_token_id: .* got 3 at the top level and 257 in text_config"),
        ({"bos_token_id": 3}, "^bos_token_id: .* got 3 at the top level"),
        ({"tie_word_embeddings": True}, "^tie_word_embeddings: expected False, got True"),
        ({"hidden_size": 160}, "^hidden_size: 160 is not a known key of a config that has a text"),
        ({"text_config": None}, "^text_config: expected an object, got None"),
        (
            {"model_type": "kimi_vl"},
            "^model_type: expected 'kimi_k25' beside text_config, got 'kimi_vl'",
        ),
        ({"model_type": None}, "^model_type: .* beside text_config, got None"),
    ],
)
def test_levels_of_a_nested_config_that_conflict_are_refused(
    changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        ModelConfig.from_dict(multimodal(tiny_config(quantization_config=INT4)) | changes)


def test_the_gate_is_what_the_models_own_class_would_set() -> None:
    """A silent config.json takes its class's default; without a known class it is refused."""

    def gate(**changes: Any) -> tuple[str, str]:
        config = ModelConfig.from_dict(tiny_config(**changes))
        return config.scoring_func, config.topk_method

    assert gate() == gate(model_type="deepseek_v3") == ("sigmoid", "noaux_tc")
    assert gate(model_type="deepseek_v2") == ("softmax", "greedy")
    said = {"scoring_func": "softmax", "topk_method": "group_limited_greedy"}
    assert gate(model_type="deepseek_v3", **said) == tuple(said.values())
    assert gate(model_type="of_tomorrow", **said) == tuple(said.values())
    kinds: tuple[Any, ...] = ("of_tomorrow", None, [])
    for kind in kinds:
        for missing in said:
            stated = {k: v for k, v in said.items() if k != missing}
            pattern = rf"^{missing}: missing, .* model_type {re.escape(repr(kind))}"
            with pytest.raises(ConfigError, match=pattern):
                gate(model_type=kind, **stated)


def test_what_follows_from_the_gates_method() -> None:
    """Group score, bias, and by what weights are multiplied: softmax gates scale or normalise."""
    softmax = {"scoring_func": "softmax", "routed_scaling_factor": 16.0}
    for changes, expected in (
        ({}, ("top2_sum", True, 2.827)),
        ({"norm_topk_prob": False}, ("top2_sum", True, 2.827)),
        (softmax | {"topk_method": "greedy"}, (None, False, 1.0)),
        (softmax | {"topk_method": "greedy", "norm_topk_prob": False}, (None, False, 16.0)),
        (softmax | {"topk_method": "group_limited_greedy", "n_group": 1}, ("max", False, 1.0)),
    ):
        config = ModelConfig.from_dict(tiny_config(**changes))
        assert (config.group_score, config.has_gate_bias, config.expert_scaling) == expected


@pytest.mark.parametrize("field", ["n_group", "norm_topk_prob", "rms_norm_eps", "eos_token_id"])
def test_a_missing_field_is_named(field: str) -> None:
    raw = tiny_config()
    del raw[field]
    with pytest.raises(ConfigError, match=rf"^{field}: missing"):
        ModelConfig.from_dict(raw)


def test_training_keys_are_ignored() -> None:
    raw = tiny_config(aux_loss_alpha=0.001, seq_aux=True, torch_dtype="bfloat16", use_cache=True)
    assert ModelConfig.from_dict(raw) == ModelConfig.from_dict(tiny_config())


def test_a_whole_number_is_a_float_where_a_float_belongs() -> None:
    """An ONNX attribute made from it would else be an integer."""
    config = ModelConfig.from_dict(tiny_config(routed_scaling_factor=1, rms_norm_eps=1))
    assert type(config.routed_scaling_factor) is type(config.rms_norm_eps) is float


def test_every_field_of_the_config_is_frozen() -> None:
    config = ModelConfig.from_dict(tiny_config())
    for owner in (config, config.rope):
        for field in dataclasses.fields(owner):
            with pytest.raises(dataclasses.FrozenInstanceError):
                setattr(owner, field.name, 1)


@pytest.mark.parametrize("raw", [tiny_config(), new_form()], ids=["old form", "new form"])
def test_reading_a_config_leaves_its_source_as_it_was(raw: dict[str, Any]) -> None:
    before = copy.deepcopy(raw)
    ModelConfig.from_dict(raw)
    assert raw == before


def test_a_preset_a_file_and_a_folder_are_read_alike(tmp_path: Path) -> None:
    raw = load_raw_config("k2")
    (tmp_path / "config.json").write_text(json.dumps(raw), encoding="utf-8")
    assert load_config(tmp_path) == load_config(tmp_path / "config.json") == load_config("k2")


@pytest.mark.parametrize("text", ["{", "[]", "", '"k2"'])
def test_a_file_that_holds_no_json_object_is_an_error_naming_it(tmp_path: Path, text: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=str(path)):
        load_config(path)


def test_an_unknown_source_is_an_error_that_lists_the_presets(tmp_path: Path) -> None:
    for source in ("k3", tmp_path):
        with pytest.raises(ConfigError, match=rf"{source}: no such preset \(there are: .*\bk2, "):
            load_config(source)


def test_an_error_in_a_file_names_the_file_and_the_field(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(tiny_config(hidden_act="gelu")), encoding="utf-8")
    with pytest.raises(ConfigError, match=rf"^{tmp_path}: hidden_act: expected 'silu', got 'gelu'"):
        load_config(tmp_path)
