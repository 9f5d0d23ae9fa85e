"""Features of the relatives' checkpoints that Kimi K2's lacks: INT4 experts, scales in e8m0, a
vision tower around the text model, layers that are not used, other gates and query projections.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from export.checkpoint.block_fp8 import BlockFP8
from export.checkpoint.group_int4 import GroupInt4, decode_int4, encode_int4
from export.checkpoint.open import Checkpoint
from export.checkpoint.shards import INDEX, CheckpointError
from export.checkpoint.tensor_names import expected_tensors
from graphs.contract.config import TEXT_PREFIX, ModelConfig
from tests.support.helpers import INT4, multimodal, random_state, tiny_config, written

LAYER = "model.layers.1."
EXPERT = f"{LAYER}mlp.experts.3.down_proj.weight"  # 160 × 72: three groups of 32, the last of 8
O_PROJ = f"{LAYER}self_attn.o_proj.weight"
Q_A = f"{LAYER}self_attn.q_a_proj.weight"  # 136 × 160: a grid of 2 × 2
Edit = Callable[[dict[str, Tensor]], object]


def make(path: Path, raw: dict[str, Any], edit: Edit = lambda tensors: None) -> Path:
    """A checkpoint in one shard, edited."""
    written(path, raw, shards=1)
    (shard,) = path.glob("*.safetensors")
    tensors = load_file(shard)
    edit(tensors)
    save_file(tensors, shard)
    index = {"weight_map": dict.fromkeys(tensors, shard.name)}
    (path / INDEX).write_text(json.dumps(index), encoding="utf-8")
    return path


def small(**changes: Any) -> dict[str, Any]:
    return tiny_config(num_hidden_layers=2, **changes)


def test_int4_experts_are_decoded_and_all_else_is_bf16(tmp_path: Path) -> None:
    raw = small(quantization_config=INT4)
    config = ModelConfig.from_dict(raw)
    state, checkpoint = random_state(config), Checkpoint.open(make(tmp_path, raw))
    assert checkpoint.unknown == () and checkpoint.ignored == {}
    assert f"{EXPERT}_packed" in checkpoint.stored and EXPERT not in checkpoint.stored
    reference = checkpoint.reference().state_dict()
    assert {n: tuple(t.shape) for n, t in reference.items()} == expected_tensors(config)
    for name, tensor in reference.items():
        expected = state[name].bfloat16().float()
        if ".mlp.experts." in name:
            expected = decode_int4(encode_int4(state[name], 32))
        elif name.endswith("bias"):
            expected = state[name]
        assert torch.equal(tensor, expected), name


def test_the_text_model_of_a_multimodal_checkpoint_is_read_below_its_prefix(
    tmp_path: Path,
) -> None:
    text = small(quantization_config=INT4)
    vision = {"vision_tower.encoder.norm.weight": torch.ones(3), "mm_projector.0": torch.ones(2)}
    folder = make(tmp_path / "nested", multimodal(text), lambda tensors: tensors.update(vision))
    stored = json.loads((folder / INDEX).read_text("utf-8"))["weight_map"]
    assert f"{TEXT_PREFIX}{O_PROJ}" in stored and O_PROJ not in stored
    nested, plain = Checkpoint.open(folder), Checkpoint.open(make(tmp_path / "plain", text))
    assert nested.config == plain.config
    assert nested.ignored == {"the vision tower and its projector": 2} and nested.unknown == ()
    nested_state, plain_state = (c.reference().state_dict() for c in (nested, plain))
    assert all(torch.equal(nested_state[name], plain_state[name]) for name in plain_state)
    lone = make(tmp_path / "lone", text, lambda tensors: tensors.update(vision))
    assert Checkpoint.open(lone).unknown == tuple(sorted(vision))


def test_layers_that_predict_further_tokens_are_left_out_by_rule(tmp_path: Path) -> None:
    further = {"model.layers.2.eh_proj.weight": torch.ones(2, 2)}
    further["model.layers.2.self_attn.rotary_emb.inv_freq"] = torch.ones(8)

    def edit(tensors: dict[str, Tensor]) -> None:
        tensors.update(further)

    with_rule = Checkpoint.open(make(tmp_path / "a", small(num_nextn_predict_layers=1), edit))
    assert with_rule.unknown == ()
    assert sorted(with_rule.ignored.values()) == [1, 1]
    assert any("layer 2, which predicts further tokens" in rule for rule in with_rule.ignored)
    without = Checkpoint.open(make(tmp_path / "b", small(), edit))
    assert without.unknown == ("model.layers.2.eh_proj.weight",)


UE8M0 = tiny_config()["quantization_config"] | {"scale_fmt": "ue8m0"}


@pytest.mark.parametrize("stored", [torch.float32, torch.float8_e8m0fnu])
def test_scales_that_are_powers_of_two_may_be_stored_in_a_byte(
    tmp_path: Path, stored: torch.dtype
) -> None:
    codes = np.array([[118, 127], [1, 130]], np.uint8)
    expected = np.exp2(codes.astype(np.float64) - 127)
    scale = torch.from_numpy(codes).view(torch.float8_e8m0fnu)

    def edit(tensors: dict[str, Tensor]) -> None:
        name = f"{Q_A}_scale_inv"
        tensors[name] = (
            scale if stored == torch.float8_e8m0fnu else torch.from_numpy(expected).float()
        )

    checkpoint = Checkpoint.open(make(tmp_path, small(quantization_config=UE8M0), edit))
    weight = checkpoint.weight(Q_A)
    assert isinstance(weight, BlockFP8) and np.array_equal(weight.scale.numpy(), expected)
    values = weight.weight.view(torch.uint8).numpy().view(ml_dtypes.float8_e4m3fn)
    spread = np.repeat(np.repeat(expected, 128, 0), 128, 1)[:136, :160]
    wide = values.astype(np.float64) * spread
    assert np.array_equal(checkpoint.wide(Q_A).numpy(), wide.astype(np.float32))


def test_block_fp8_is_decoded_as_transformers_does_on_whole_blocks(tmp_path: Path) -> None:
    """Only there: elsewhere it infers the block's size from the shapes (cases 8 and 9)."""
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    raw = small(hidden_size=256, moe_intermediate_size=128, intermediate_size=384)
    checkpoint = Checkpoint.open(make(tmp_path, raw))
    for name in (EXPERT, "model.layers.0.mlp.down_proj.weight"):
        weight = checkpoint.weight(name)
        assert isinstance(weight, BlockFP8) and weight.scale.shape[0] == 2
        expected = Fp8Dequantize(None)._dequantize_one(weight.weight, weight.scale, torch.float32)
        assert torch.equal(checkpoint.wide(name), expected)


@pytest.mark.parametrize(
    "changes",
    [
        {"q_lora_rank": None, "rope_scaling": None, "n_shared_experts": 2},
        {"model_type": "deepseek_v2", "q_lora_rank": None, "norm_topk_prob": False},
        {"n_group": 4, "topk_group": 2, "num_experts_per_tok": 2},
    ],
    ids=["moonlight", "deepseek-v2-lite", "deepseek-v3"],
)
def test_relatives_have_exactly_the_tensors_that_their_config_calls_for(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    checkpoint = Checkpoint.open(make(tmp_path, small(**changes)))
    direct, biased = changes.get("q_lora_rank", 1) is None, "model_type" not in changes
    assert (f"{LAYER}self_attn.q_proj.weight" in checkpoint.stored) == direct
    assert (Q_A in checkpoint.stored) == (not direct)
    assert (f"{LAYER}mlp.gate.e_score_correction_bias" in checkpoint.stored) == biased
    assert checkpoint.unknown == ()


def set_to(name: str, value: Tensor) -> Edit:
    return lambda tensors: tensors.update({name: value})


def drop(name: str) -> Edit:
    return lambda tensors: tensors.pop(name)


def pack_o_proj(tensors: dict[str, Tensor]) -> None:
    packed = encode_int4(tensors.pop(O_PROJ).float(), 32)
    tensors |= {f"{O_PROJ}_packed": packed.packed, f"{O_PROJ}_scale": packed.scale}


def pack_expert(tensors: dict[str, Tensor]) -> None:
    """Store an expert as INT4, though the config says block FP8."""
    tensors[f"{EXPERT}_packed"] = encode_int4(tensors.pop(EXPERT).float(), 32).packed


FP8_WEIGHT = torch.ones(160, 60).to(torch.float8_e4m3fn)
INT4_FAULTS: dict[str, tuple[Edit, str]] = {
    "no scale": (drop(f"{EXPERT}_scale"), f"tensor {EXPERT}_scale is missing"),
    "no shape": (drop(f"{EXPERT}_shape"), f"tensor {EXPERT}_shape is missing"),
    "nothing": (drop(f"{EXPERT}_packed"), rf"tensor {EXPERT} is missing \(1 missing in all\)"),
    "packed along the wrong axis": (
        set_to(f"{EXPERT}_packed", torch.zeros(20, 72, dtype=torch.int32)),
        rf"{EXPERT}_packed: expected shape \(160, 9\) .* in groups of 32\), got \(20, 72\) in ",
    ),
    "packed into bytes": (
        set_to(f"{EXPERT}_packed", torch.zeros(160, 9, dtype=torch.uint8)),
        f"{EXPERT}_packed: expected int32 for .*, got torch.uint8 in .*safetensors",
    ),
    "groups of another size": (
        set_to(f"{EXPERT}_scale", torch.ones(160, 5, dtype=torch.bfloat16)),
        rf"{EXPERT}_scale: expected shape \(160, 3\) .*, got \(160, 5\)",
    ),
    "scales of integers": (
        set_to(f"{EXPERT}_scale", torch.ones(160, 3, dtype=torch.int32)),
        f"{EXPERT}_scale: expected bf16, fp16 or fp32 for .*, got torch.int32",
    ),
    "NaN in a scale": (
        set_to(f"{EXPERT}_scale", torch.full((160, 3), torch.nan)),
        rf"{EXPERT}_scale: expected .*, got NaN or infinity at index \(0, 0\)",
    ),
    "a shape that is not the config's": (
        set_to(f"{EXPERT}_shape", torch.tensor([160, 71])),
        rf"{EXPERT}_shape: expected \(160, 72\) from config.json, got \(160, 71\) in .*",
    ),
    "both forms": (
        set_to(EXPERT, torch.zeros(160, 72, dtype=torch.bfloat16)),
        f"{EXPERT}: expected one stored form, got {EXPERT} and {EXPERT}_packed",
    ),
    "INT4 attention": (
        pack_o_proj,
        f"{O_PROJ}: expected 16 or 32 bits, since it is no routed expert, got INT4 in ",
    ),
    "FP8 beside INT4": (
        set_to(O_PROJ, FP8_WEIGHT),
        f"{O_PROJ}: .* no quantization_config with quant_method 'fp8', got FP8 in ",
    ),
}


@pytest.mark.parametrize(("edit", "message"), INT4_FAULTS.values(), ids=INT4_FAULTS)
def test_a_faulty_int4_tensor_is_named_with_what_was_expected(
    tmp_path: Path, edit: Edit, message: str
) -> None:
    folder = make(tmp_path, small(quantization_config=INT4), edit)
    with pytest.raises(CheckpointError, match=message):
        Checkpoint.open(folder).reference()


def byte_scales(code: int) -> Edit:
    codes = torch.full((2, 2), 127, dtype=torch.uint8)
    codes[1, 0] = code
    return set_to(f"{Q_A}_scale_inv", codes.view(torch.float8_e8m0fnu))


FP8_FAULTS: dict[str, tuple[Edit, str]] = {
    "NaN as e8m0": (
        byte_scales(255),
        rf"{Q_A}_scale_inv: expected .*, got NaN or infinity at index \(1, 0\)",
    ),
    "a scale below 0": (
        set_to(f"{Q_A}_scale_inv", torch.tensor([[1.0, 1.0], [1.0, -0.5]])),
        rf"{Q_A}_scale_inv: expected scales of at least 0, got -0.5 at index \(1, 1\) in ",
    ),
    "INT4 beside FP8": (
        pack_expert,
        f"{EXPERT}: .* no quantization_config with quant_method 'compressed-tensors', got INT4",
    ),
    "a type of no weight": (
        set_to("extra", torch.zeros(2, dtype=torch.complex64)),
        "tensor extra: expected a type among .*, got C64",
    ),
}


@pytest.mark.parametrize(("edit", "message"), FP8_FAULTS.values(), ids=FP8_FAULTS)
def test_a_faulty_fp8_tensor_is_named_with_what_was_expected(
    tmp_path: Path, edit: Edit, message: str
) -> None:
    folder = make(tmp_path, small(), edit)
    with pytest.raises(CheckpointError, match=message):
        Checkpoint.open(folder).reference()


def test_the_decoders_shape_is_checked_when_the_checkpoint_is_opened(tmp_path: Path) -> None:
    """So that nothing is packed of a checkpoint whose last tensor is wrong."""
    edit = set_to(f"{EXPERT}_scale", torch.ones(160, 5, dtype=torch.bfloat16))
    folder = make(tmp_path, small(quantization_config=INT4), edit)
    with pytest.raises(CheckpointError, match=f"{EXPERT}_scale"):
        Checkpoint.open(folder)


def test_int4_is_read_whole(tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(make(tmp_path, small(quantization_config=INT4)))
    weight = checkpoint.weight(EXPERT)
    assert isinstance(weight, GroupInt4) and weight.shape == (160, 72)
    assert [s.name for s in checkpoint.sources(EXPERT)] == [
        f"{EXPERT}{part}" for part in ("_packed", "_scale", "_shape")
    ]
