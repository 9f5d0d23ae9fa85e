"""Checkpoints: written and read back, spread over shards, and every fault named."""

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from export.checkpoint.block_fp8 import BlockFP8, decode, encode
from export.checkpoint.open import Checkpoint
from export.checkpoint.shards import INDEX, CheckpointError
from export.checkpoint.tensor_names import expected_tensors, is_linear
from export.checkpoint.weight_forms import SCALE_SUFFIX
from export.synthetic.write_checkpoint import write_checkpoint
from graphs.contract.config import ModelConfig
from graphs.contract.rope_config import ConfigError
from tests.support.helpers import random_state, tiny_checkpoint, tiny_config

RAW = tiny_config(num_hidden_layers=2)
CONFIG = ModelConfig.from_dict(RAW)
EXPECTED = expected_tensors(CONFIG)
LAYER = "model.layers.1."
Q_A = f"{LAYER}self_attn.q_a_proj.weight"  # 136 × 160: a grid of 2 × 2
BIAS = f"{LAYER}mlp.gate.e_score_correction_bias"
NORM = f"{LAYER}input_layernorm.weight"


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("tiny") / "written", num_hidden_layers=2)


@pytest.fixture
def folder(written: Path, tmp_path: Path) -> Path:
    """A copy, to be changed."""
    return Path(shutil.copytree(written, tmp_path / "checkpoint"))


def change(folder: Path, edit: Callable[[dict[str, Tensor]], object]) -> None:
    """Edit all tensors, and write them to one shard; its index names what is there then."""
    tensors: dict[str, Tensor] = {}
    for shard in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(shard)
        shard.unlink()
    edit(tensors)
    save_file(tensors, folder / "model.safetensors")
    write_index(folder, dict.fromkeys(tensors, "model.safetensors"))


def write_index(folder: Path, weight_map: Any) -> None:
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}), encoding="utf-8")


def read_index(folder: Path) -> dict[str, str]:
    shards: dict[str, str] = json.loads((folder / INDEX).read_text("utf-8"))["weight_map"]
    return shards


def put(name: str, at: int | tuple[int, int], value: float) -> Callable[[dict[str, Tensor]], None]:
    def edit(tensors: dict[str, Tensor]) -> None:
        tensors[name][at] = value

    return edit


def test_a_written_checkpoint_is_read_back(folder: Path) -> None:
    state, checkpoint = random_state(CONFIG), Checkpoint.open(folder)
    assert checkpoint.unknown == ()
    reference = checkpoint.reference().state_dict()
    assert {name: tuple(t.shape) for name, t in reference.items()} == EXPECTED
    for name, tensor in reference.items():
        expected = state[name].bfloat16().float()
        if is_linear(name):
            expected = decode(encode(state[name], (128, 128)))
        elif name == BIAS:
            expected = state[name]
        assert tensor.dtype == torch.float32 and torch.equal(tensor, expected), name


def test_stored_types_are_the_formats(folder: Path) -> None:
    checkpoint = Checkpoint.open(folder)
    weight = checkpoint.weight(Q_A)
    assert isinstance(weight, BlockFP8) and weight.scale.shape == (2, 2)
    assert checkpoint.stored[Q_A + SCALE_SUFFIX].dtype == torch.float32
    assert checkpoint.stored[BIAS].dtype == torch.float32
    for name in (NORM, f"{LAYER}mlp.gate.weight", "lm_head.weight", "model.embed_tokens.weight"):
        assert checkpoint.stored[name].dtype == torch.bfloat16
    stored = set(checkpoint.stored)
    assert stored == set(EXPECTED) | {n + SCALE_SUFFIX for n in EXPECTED if is_linear(n)}


def test_without_quantisation_every_weight_is_bf16(tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path, num_hidden_layers=2, quantization_config=None)
    checkpoint = Checkpoint.open(tmp_path)
    assert set(checkpoint.stored) == set(EXPECTED)
    expected = random_state(CONFIG)[Q_A].bfloat16().float()
    assert torch.equal(checkpoint.wide(Q_A), expected)


def test_shards_and_total_size_are_those_of_the_index(folder: Path) -> None:
    index = json.loads((folder / INDEX).read_text("utf-8"))
    shards = sorted(path.name for path in folder.glob("*.safetensors"))
    assert shards == [f"model-0000{i}-of-000002.safetensors" for i in (1, 2)]
    assert set(index["weight_map"].values()) == set(shards)
    tensors = [t for name in shards for t in load_file(folder / name).values()]
    assert index["metadata"]["total_size"] == sum(t.numel() * t.element_size() for t in tensors)


def test_writing_twice_gives_the_same_bytes(folder: Path, tmp_path: Path) -> None:
    again = tiny_checkpoint(tmp_path / "again", num_hidden_layers=2)
    for path in folder.iterdir():
        assert path.read_bytes() == (again / path.name).read_bytes()


def test_weight_and_scale_may_lie_in_different_shards(folder: Path) -> None:
    """Case 10."""
    before = Checkpoint.open(folder).wide(Q_A)
    shards = read_index(folder)
    tensors = load_file(folder / shards[Q_A])
    save_file({Q_A + SCALE_SUFFIX: tensors.pop(Q_A + SCALE_SUFFIX)}, folder / "scale.safetensors")
    save_file(tensors, folder / shards[Q_A])
    write_index(folder, shards | {Q_A + SCALE_SUFFIX: "scale.safetensors"})
    assert torch.equal(Checkpoint.open(folder).wide(Q_A), before)


def test_one_shard_needs_no_index(tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path, shards=1, num_hidden_layers=2)
    indexed = Checkpoint.open(tmp_path)
    (tmp_path / INDEX).unlink()
    assert Checkpoint.open(tmp_path).stored == indexed.stored


def test_stored_frequencies_are_ignored_and_unknown_tensors_reported(folder: Path) -> None:
    """Case 10."""
    extra = {
        f"{LAYER}self_attn.rotary_emb.inv_freq": torch.ones(8),
        f"{LAYER}self_attn.q_proj.weight": torch.ones(4, 4),
        "model.layers.2.mlp.gate.weight": torch.ones(4, 4),
    }
    change(folder, lambda tensors: tensors.update(extra))
    checkpoint = Checkpoint.open(folder)
    assert checkpoint.unknown == (
        f"{LAYER}self_attn.q_proj.weight",
        "model.layers.2.mlp.gate.weight",
    )
    assert set(checkpoint.reference().state_dict()) == set(EXPECTED)


@pytest.mark.parametrize("name", [Q_A, BIAS, NORM, "lm_head.weight"])
def test_a_missing_tensor_is_named(folder: Path, name: str) -> None:
    """Case 10."""
    change(folder, lambda tensors: tensors.pop(name))
    with pytest.raises(CheckpointError, match=rf"tensor {name} is missing \(1 missing in all\)"):
        Checkpoint.open(folder)


def test_a_missing_scale_is_named(folder: Path) -> None:
    change(folder, lambda tensors: tensors.pop(Q_A + SCALE_SUFFIX))
    with pytest.raises(CheckpointError, match=rf"tensor {Q_A}{SCALE_SUFFIX} is missing"):
        Checkpoint.open(folder).reference()


def set_to(name: str, value: Tensor) -> Callable[[dict[str, Tensor]], None]:
    return lambda tensors: tensors.update({name: value})


FP8_ROW = torch.ones(160).to(torch.float8_e4m3fn)
FAULTS: dict[str, tuple[Callable[[dict[str, Tensor]], None], str]] = {
    "a transposed weight": (
        lambda tensors: tensors.update({Q_A: tensors[Q_A].T.contiguous()}),
        rf"{Q_A}: expected shape \(136, 160\) from config.json .*, got \(160, 136\) in .*model",
    ),
    "a grid of another block size": (
        set_to(Q_A + SCALE_SUFFIX, torch.ones(3, 2)),
        rf"{Q_A}{SCALE_SUFFIX}: expected shape \(2, 2\) from config.json \(fp32 or "
        r"float8_e8m0fnu, the scale grid of \(136, 160\) with weight_block_size 128×128\), got "
        r"\(3, 2\) in .*model.safetensors",
    ),
    "scales in bf16": (
        set_to(Q_A + SCALE_SUFFIX, torch.ones(2, 2, dtype=torch.bfloat16)),
        rf"{Q_A}{SCALE_SUFFIX}: expected fp32 .* got torch.bfloat16 in ",
    ),
    "a weight of integers": (
        set_to(Q_A, torch.ones(136, 160, dtype=torch.int8)),
        f"{Q_A}: expected bf16, fp16, fp32 or float8_e4m3fn, got torch.int8",
    ),
    "a weight in the other FP8": (
        set_to(Q_A, torch.ones(136, 160).to(torch.float8_e5m2)),
        f"{Q_A}: expected bf16, fp16, fp32 or float8_e4m3fn, got torch.float8_e5m2",
    ),
    "a norm in FP8": (
        set_to(NORM, FP8_ROW),
        f"{NORM}: expected 16 or 32 bits, since it is no linear layer, got FP8 in .*model.safe",
    ),
    "a bf16 weight with a scale grid": (
        set_to(Q_A, torch.ones(136, 160, dtype=torch.bfloat16)),
        f"{Q_A}: expected float8_e4m3fn, since {Q_A}{SCALE_SUFFIX} is its .*, got torch.bfloat16",
    ),
    "NaN in the bias": (
        put(BIAS, 5, math.nan),
        rf"{BIAS}: expected .*, got NaN or infinity at index \(5,\) in .*model\.safe",
    ),
    "infinity in a norm": (
        put(NORM, 9, math.inf),
        rf"{NORM}: expected .*, got NaN or infinity at index \(9,\)",
    ),
    "infinity in a bf16 weight": (
        put("lm_head.weight", (7, 3), -math.inf),
        r"lm_head.weight: expected .*, got NaN or infinity at index \(7, 3\) in .*model\.s",
    ),
    "NaN in an FP8 weight": (
        put(Q_A, (130, 2), math.nan),
        rf"{Q_A}: expected .*, got NaN or infinity at index \(130, 2\) in .*model\.s",
    ),
    "infinity in a scale": (
        put(Q_A + SCALE_SUFFIX, (1, 0), math.inf),
        rf"{Q_A}{SCALE_SUFFIX}: expected .*, got NaN or infinity at index \(1, 0\) in .*model\.s",
    ),
}


@pytest.mark.parametrize(("edit", "message"), FAULTS.values(), ids=FAULTS)
def test_a_faulty_tensor_is_named_with_what_was_expected(
    folder: Path, edit: Callable[[dict[str, Tensor]], None], message: str
) -> None:
    """Cases 7, 9 and 16."""
    change(folder, edit)
    with pytest.raises(CheckpointError, match=message):
        Checkpoint.open(folder).reference()


def test_a_negative_nan_byte_is_refused(folder: Path) -> None:
    """Case 16: e4m3 has two, 0x7F and 0xFF."""

    def edit(tensors: dict[str, Tensor]) -> None:
        tensors[Q_A].view(torch.uint8)[0, 1] = 0xFF

    change(folder, edit)
    with pytest.raises(
        CheckpointError,
        match=rf"{Q_A}: expected .*, got NaN or infinity at index \(0, 1\)",
    ):
        Checkpoint.open(folder).weight(Q_A)


def test_fp8_without_a_quantization_config_is_refused(folder: Path) -> None:
    raw = {k: v for k, v in RAW.items() if k != "quantization_config"}
    (folder / "config.json").write_text(json.dumps(raw), encoding="utf-8")
    with pytest.raises(
        CheckpointError, match=r"weight: .* since config.json has no quantization_config .* got FP8"
    ):
        Checkpoint.open(folder).reference()


def test_a_truncated_shard_is_named(folder: Path) -> None:
    shard = folder / read_index(folder)[Q_A]
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=f"{shard}: not a complete safetensors file"):
        Checkpoint.open(folder).reference()


def test_a_tensor_missing_from_its_shard_is_named(folder: Path) -> None:
    shards = read_index(folder)
    other = next(shard for shard in shards.values() if shard != shards[Q_A])
    write_index(folder, shards | {Q_A: other})
    with pytest.raises(
        CheckpointError, match=f"{other}: tensor {Q_A} is missing, though {INDEX} places it there"
    ):
        Checkpoint.open(folder).reference()


@pytest.mark.parametrize("shard", ["../elsewhere.safetensors", "/etc/hostname", "absent.st", ""])
def test_a_shard_that_is_not_in_the_folder_is_refused(folder: Path, shard: str) -> None:
    outside = folder.parent / "elsewhere.safetensors"
    outside.write_bytes((folder / read_index(folder)[Q_A]).read_bytes())
    write_index(folder, read_index(folder) | {Q_A: shard})
    with pytest.raises(
        CheckpointError, match=f"names shard '{shard}', which is not in this folder"
    ):
        Checkpoint.open(folder)


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"weight_map": []}'])
def test_a_damaged_index_is_named(folder: Path, text: str) -> None:
    (folder / INDEX).write_text(text, encoding="utf-8")
    with pytest.raises(CheckpointError, match=f"{INDEX}: expected a JSON object with 'weight_map'"):
        Checkpoint.open(folder)


def test_several_shards_without_an_index_are_refused(folder: Path) -> None:
    (folder / INDEX).unlink()
    with pytest.raises(
        CheckpointError, match=f"expected {INDEX} or one .safetensors file, got 2 files"
    ):
        Checkpoint.open(folder)


def test_a_write_that_fails_leaves_nothing(tmp_path: Path) -> None:
    state, target = random_state(CONFIG), tmp_path / "new"
    wrong = [
        (
            {k: v for k, v in state.items() if k != Q_A},
            rf"{Q_A}: expected shape \(136, 160\) .*, got None",
        ),
        (
            state | {"model.extra": torch.ones(2)},
            r"model.extra: expected shape None .*, got \(2,\)",
        ),
        (state | {Q_A: state[Q_A].T}, rf"{Q_A}: expected shape \(136, 160\) .*, got \(160, 136\)"),
    ]
    for content, message in wrong:
        with pytest.raises(CheckpointError, match=message):
            write_checkpoint(target, RAW, content)
    with pytest.raises(ConfigError):
        write_checkpoint(target, RAW | {"hidden_act": "gelu"}, state)
    assert not target.exists()


@pytest.mark.parametrize("name", [Q_A, NORM, BIAS])
def test_a_state_that_is_not_finite_is_not_written(tmp_path: Path, name: str) -> None:
    """Case 16."""
    state, target = random_state(CONFIG), tmp_path / "new"
    state[name].view(-1)[3] = math.inf
    with pytest.raises(
        CheckpointError,
        match=rf"{name}: expected .*, got NaN or infinity at index \((0, )?3,?\)",
    ):
        write_checkpoint(target, RAW, state)
    assert not target.exists()
