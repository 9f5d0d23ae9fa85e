"""Packing: what changes from a checkpoint to the engines' layout, and that nothing else does."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from export.checkpoint.open import Checkpoint
from export.checkpoint.shards import CheckpointError
from export.engine.layers import LinearForm
from export.engine.to_onnx import export_graphs
from export.packing.layer_weights import LayerPacker, channel_fp8, half_layout
from export.packing.pack import pack
from export.packing.record import RECORD_FILE, record_checkpoint
from export.packing.staging import STAGING
from graphs.contract.spec import BuildError, BuildSpec, Precision, layer_file
from graphs.contract.tensorfile import TensorFile, write_arrays
from runtime.devices.weights import Weights
from tests.support.helpers import tiny_checkpoint, tiny_config
from tests.support.shared_builds import export_once


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return Checkpoint.open(tiny_checkpoint(tmp_path_factory.mktemp("tiny") / "checkpoint"))


@pytest.fixture(scope="module")
def build(tiny: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A packed fp8 build of the tiny checkpoint."""
    folder = tmp_path_factory.mktemp("tiny") / "fp8"
    export_once(tiny.raw_config, "fp8", folder)
    pack(tiny, folder)
    return folder


def layer_weight(tiny: Checkpoint, layer: int, name: str) -> torch.Tensor:
    return tiny.wide(f"model.layers.{layer}.{name}.weight")


def test_half_layout_puts_evens_first() -> None:
    assert half_layout(6).tolist() == [0, 2, 4, 1, 3, 5]


def test_query_and_latent_projections_are_fused_with_rope_rows_in_half_layout(
    tiny: Checkpoint,
) -> None:
    c = tiny.config
    packed = LayerPacker(tiny, LinearForm.from_precision("fp32"), 1).tensors("attention.qkv_a")[
        "weight"
    ]
    q_a = layer_weight(tiny, 1, "self_attn.q_a_proj")
    kv_a = layer_weight(tiny, 1, "self_attn.kv_a_proj_with_mqa")
    rope = kv_a[c.kv_lora_rank :]
    expected = torch.cat([q_a, kv_a[: c.kv_lora_rank], rope[0::2], rope[1::2]])
    assert torch.equal(packed, expected)


def test_each_head_of_q_b_keeps_its_nope_rows_and_permutes_its_rope_rows(tiny: Checkpoint) -> None:
    c = tiny.config
    packed = LayerPacker(tiny, LinearForm.from_precision("fp32"), 0).tensors("attention.q_b")[
        "weight"
    ]
    original = layer_weight(tiny, 0, "self_attn.q_b_proj")
    shape = (c.num_attention_heads, c.qk_head_dim, original.shape[1])
    for ours, theirs in zip(packed.view(shape), original.view(shape), strict=True):
        assert torch.equal(ours[: c.qk_nope_head_dim], theirs[: c.qk_nope_head_dim])
        rope = theirs[c.qk_nope_head_dim :]
        assert torch.equal(ours[c.qk_nope_head_dim :], torch.cat([rope[0::2], rope[1::2]]))


def test_w_uk_and_w_uv_are_each_heads_two_row_blocks(tiny: Checkpoint) -> None:
    c = tiny.config
    packed = LayerPacker(tiny, LinearForm.from_precision("bf16"), 0).tensors("attention")
    kv_b = layer_weight(tiny, 0, "self_attn.kv_b_proj").to(torch.bfloat16)
    per_head = kv_b.view(c.num_attention_heads, -1, c.kv_lora_rank)
    assert torch.equal(packed["w_uk"], per_head[:, : c.qk_nope_head_dim])
    assert torch.equal(packed["w_uv"].transpose(1, 2), per_head[:, c.qk_nope_head_dim :])


@pytest.mark.parametrize(
    "layer, name, sources",
    [
        (0, "mlp.gate_up", ("mlp.gate_proj", "mlp.up_proj")),
        (0, "mlp.down", ("mlp.down_proj",)),
        (1, "shared.gate_up", ("mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj")),
        (2, "experts.5.gate_up", ("mlp.experts.5.gate_proj", "mlp.experts.5.up_proj")),
        (2, "experts.7.down", ("mlp.experts.7.down_proj",)),
        (1, "attention.o", ("self_attn.o_proj",)),
    ],
)
def test_fp8_weights_are_channel_fp8_of_the_checkpoint(
    tiny: Checkpoint, layer: int, name: str, sources: tuple[str, ...]
) -> None:
    packed = LayerPacker(tiny, LinearForm.from_precision("fp8"), layer).tensors(name)
    names = [f"model.layers.{layer}.{s}.weight" for s in sources]
    parts = [channel_fp8(tiny.weight(n)) for n in names]
    expected = torch.cat([p.decode() for p in parts])
    weight, scale = packed["weight"], packed["scale"]
    assert weight.dtype == torch.float8_e4m3fn and scale.dtype == torch.float32
    assert torch.equal(weight.to(torch.float32) * scale[:, None], expected)


def test_files_hold_exactly_what_the_spec_lists(tiny: Checkpoint, build: Path) -> None:
    spec = BuildSpec.load(build)
    for layer in range(tiny.config.num_hidden_layers):
        file = TensorFile.open(build / layer_file(layer), spec.file_metadata(f"layer {layer}"))
        assert set(file.tensors) == set(spec.layer_tensors(layer))
    assert len(spec.layer_tensors(1)) > 8 * 4
    weights = Weights.open(build, spec)
    assert weights.embed.shape == (tiny.config.vocab_size, tiny.config.hidden_size)
    assert weights.head["lm_head.weight"].dtype == weights.embed.dtype  # 16 bits at fp8


@pytest.mark.parametrize("precision", ["fp32", "fp8"])
def test_a_16_bit_checkpoint_packs_too(tmp_path: Path, precision: Precision) -> None:
    folder = tiny_checkpoint(tmp_path / "checkpoint", quantization_config=None)
    checkpoint = Checkpoint.open(folder)
    packed = LayerPacker(checkpoint, LinearForm.from_precision(precision), 0).tensors("mlp.down")
    down = layer_weight(checkpoint, 0, "mlp.down_proj")
    if precision == "fp32":
        assert torch.equal(packed["weight"], down)
    else:
        decoded = packed["weight"].to(torch.float32) * packed["scale"][:, None]
        assert (decoded - down).norm() / down.norm() < 0.04


def snapshot(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_packing_twice_gives_the_same_bytes(tiny: Checkpoint, build: Path) -> None:
    before = snapshot(build)
    pack(tiny, build)
    assert snapshot(build) == before


def test_another_models_checkpoint_is_refused_and_changes_nothing(
    tmp_path: Path, build: Path
) -> None:
    other = Checkpoint.open(tiny_checkpoint(tmp_path / "other", rope_theta=10000.0))
    before = snapshot(build)
    with pytest.raises(BuildError, match="exported from another config"):
        pack(other, build)
    assert snapshot(build) == before


def test_a_checkpoint_that_turns_out_bad_midway_changes_nothing(
    tmp_path: Path, build: Path
) -> None:
    folder = tiny_checkpoint(tmp_path / "bad", shards=1)
    (shard,) = folder.glob("*.safetensors")
    tensors = load_file(shard)
    tensors["model.layers.2.input_layernorm.weight"][3] = torch.nan
    save_file(tensors, shard)
    copy = Path(shutil.copytree(build, tmp_path / "build"))
    (copy / RECORD_FILE).unlink()  # or it would be refused as another checkpoint
    before = snapshot(copy)
    with pytest.raises(CheckpointError, match=r"layers\.2\.input_layernorm.*index \(3,\)"):
        pack(Checkpoint.open(folder), copy)
    kept = {name: content for name, content in snapshot(copy).items() if STAGING not in name}
    assert kept == before


def test_tokenizer_and_generation_config_come_along(tmp_path: Path, build: Path) -> None:
    folder = tiny_checkpoint(tmp_path / "checkpoint")
    (folder / "tiktoken.model").write_text("IQ== 0\n")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 257}))
    copy = tmp_path / "build"
    shutil.copytree(build, copy)
    record_checkpoint(folder, copy)
    steps: list[tuple[str, int, int]] = []
    files = pack(Checkpoint.open(folder), copy, progress=lambda *step: steps.append(step))
    assert copy / "tokenizer" / "tiktoken.model" in files
    assert json.loads((copy / "generation_config.json").read_text()) == {"eos_token_id": 257}
    assert all(f.is_file() for f in files)
    done = [step[1] for step in steps]
    assert done == sorted(set(done)) and done[-1] == steps[-1][2]


def test_a_folder_of_another_precision_is_refused_by_export(build: Path) -> None:
    before = snapshot(build)
    with pytest.raises(BuildError, match=r"got one of fp8 and"):
        export_graphs(tiny_config(), "bf16", build)
    assert snapshot(build) == before


@pytest.mark.parametrize("damage", ["truncated", "missing", "swapped", "reshaped"])
def test_a_damaged_build_is_refused_when_it_is_loaded(
    tmp_path: Path, build: Path, damage: str
) -> None:
    copy = tmp_path / "build"
    shutil.copytree(build, copy)
    spec, target = BuildSpec.load(copy), copy / layer_file(1)
    if damage == "truncated":
        target.write_bytes(target.read_bytes()[:-100])
    elif damage == "missing":
        target.unlink()
    elif damage == "swapped":
        shutil.copyfile(copy / layer_file(2), target)
    else:
        tensors = dict(TensorFile.open(target).tensors)
        tensors["post_norm.weight"] = np.ones(7, np.float32)
        write_arrays(target, tensors, spec.file_metadata("layer 1"))
    with pytest.raises(BuildError, match=r"layer_001\.safetensors: "):
        Weights.open(copy, spec)
