"""Synthetic checkpoints: every stored form opens, reads and has the stated values; bytes repeat."""

import json
import math
import shutil
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from export.checkpoint.open import Checkpoint
from export.checkpoint.shards import INDEX, CheckpointError
from export.checkpoint.tensor_names import expected_tensors, is_linear
from export.checkpoint.weight_forms import PACKED, SCALE_SUFFIX
from export.synthetic.make import MARK, reduced, write_synthetic
from export.synthetic.random_weights import NIBBLE_DEVIATION, nibbles, random_bytes, uniform
from graphs.contract.config import TEXT_PREFIX, ModelConfig, load_raw_config
from graphs.contract.rope_config import ConfigError
from tests.support.helpers import INT4, multimodal, tiny_config, written

FP8 = tiny_config(num_hidden_layers=2)
BF16 = tiny_config(num_hidden_layers=2, quantization_config=None)
POWERS = FP8 | {"quantization_config": FP8["quantization_config"] | {"scale_fmt": "ue8m0"}}
INT4_EXPERTS = tiny_config(num_hidden_layers=2, quantization_config=INT4)
FORMS = {
    "fp8": FP8,
    "powers": POWERS,
    "bf16": BF16,
    "int4": INT4_EXPERTS,
    "nested": multimodal(INT4_EXPERTS),
}
SMALL_SHARDS = 100_000


def silent(name: str, done: int, total: int) -> None:
    pass


def make(folder: Path, raw: dict[str, Any], seed: int = 0, shard_bytes: int = SMALL_SHARDS) -> Path:
    write_synthetic(raw, folder, seed, silent, shard_bytes)
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    """Every stored tensor's bytes."""
    stored = Checkpoint.open(folder).stored
    return {n: t.read().view(torch.uint8).numpy().tobytes() for n, t in stored.items()}


@pytest.fixture(scope="module", params=FORMS)
def form(request: pytest.FixtureRequest) -> dict[str, Any]:
    return FORMS[request.param]


@pytest.fixture(scope="module")
def folder(form: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("synthetic") / "checkpoint", form)


def test_its_layout_is_that_of_a_written_checkpoint(
    form: dict[str, Any], folder: Path, tmp_path: Path
) -> None:
    def layout(checkpoint: Checkpoint) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        return {n: (t.dtype, t.shape) for n, t in checkpoint.stored.items()}

    synthetic, trained = Checkpoint.open(folder), Checkpoint.open(written(tmp_path, form))
    assert layout(synthetic) == layout(trained) and synthetic.unknown == ()
    assert json.loads((folder / "config.json").read_text("utf-8")) == form
    names = json.loads((folder / INDEX).read_text("utf-8"))["weight_map"]
    assert all(n.startswith(TEXT_PREFIX) for n in names) == ("text_config" in form)


def test_values_have_the_stated_deviation(folder: Path, form: dict[str, Any]) -> None:
    slack = math.sqrt(2) if form is POWERS else 1  # of a scale's nearest power of two
    checkpoint = Checkpoint.open(folder)  # every weight is read below, so checked to be finite
    ratios = []
    for name, shape in expected_tensors(checkpoint.config).items():
        weight = checkpoint.wide(name)
        if name.endswith("norm.weight"):
            assert 0.8 <= weight.min() < weight.mean() < weight.max() <= 1.21
        elif name.endswith("bias"):
            assert 0.005 < weight.abs().mean() < weight.abs().max() <= 0.05
        else:
            fan_in = 1 if "embed" in name else shape[1]
            ratios.append(float(weight.std()) * math.sqrt(fan_in))
            assert 0.45 / slack < ratios[-1] < 1.55 * slack, name  # where there is one scale
            assert abs(float(weight.mean())) < 0.05 * float(weight.std()) + 1e-6, name
    assert np.mean(ratios) == pytest.approx(1, abs=0.06 * slack**2)


def test_no_two_scales_are_alike(folder: Path, form: dict[str, Any]) -> None:
    checkpoint = Checkpoint.open(folder)
    grids = [n for n in checkpoint.stored if n.endswith(SCALE_SUFFIX)]
    values = torch.cat([checkpoint.stored[n].read().flatten() for n in grids] or [torch.empty(0)])
    if form is POWERS:
        assert (values.frexp().mantissa == 0.5).all() and len(set(values.tolist())) > 2
    else:
        assert len(set(values.tolist())) == len(values)
    assert bool(len(values)) == (form in (FP8, POWERS))


def test_int4_nibbles_are_uniform_from_minus_seven_to_seven(tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(make(tmp_path / "c", INT4_EXPERTS))
    packed = [t.read() for n, t in checkpoint.stored.items() if n.endswith(PACKED)]
    octets = torch.cat([p.view(torch.uint8).flatten() for p in packed])
    values = torch.cat([octets & 15, octets >> 4]).to(torch.int64) - 8
    counts = torch.bincount(values + 8, minlength=16) / len(values)
    assert counts[0] == 0 and counts[8] == pytest.approx(2 / 16, abs=0.002)
    assert torch.allclose(counts[9:], torch.tensor(1 / 16), atol=0.002)
    assert torch.allclose(counts[1:8], torch.tensor(1 / 16), atol=0.002)
    assert float(values.double().square().mean().sqrt()) == pytest.approx(
        NIBBLE_DEVIATION, rel=0.01
    )


def test_each_nibble_of_zero_alone_is_replaced() -> None:
    words = np.array([0xFEDC_BA98_7654_3210, 0x0101_1010_0000_FFFF], np.uint64)
    expected = np.array([0xFEDC_BA98_7654_3218, 0x8181_1818_8888_FFFF], np.uint64)
    assert nibbles(words.copy()).view(np.uint64).tolist() == expected.tolist()


def test_values_of_an_interval_reach_both_ends() -> None:
    pieces = random_bytes(0, "any", 1 << 20, uniform(torch.float32, 3, 2))
    values = np.concatenate(list(pieces)).view(np.float32)
    assert values.min() == pytest.approx(1, abs=1e-4) and values.max() == pytest.approx(5, abs=1e-4)
    assert values.mean() == pytest.approx(3, abs=0.02) and len(values) == 1 << 18


def test_the_seed_decides_every_byte_and_the_shards_none(tmp_path: Path) -> None:
    one = make(tmp_path / "one", FP8)
    again = make(tmp_path / "again", FP8)
    whole = make(tmp_path / "whole", FP8, shard_bytes=10**9)
    other = make(tmp_path / "other", FP8, seed=1)
    files = sorted(path.name for path in one.iterdir())
    assert files == sorted(path.name for path in again.iterdir())
    assert all((one / f).read_bytes() == (again / f).read_bytes() for f in files)
    assert len(list(one.glob("*.safetensors"))) > 3 > len(list(whole.glob("*.safetensors")))
    assert contents(one) == contents(whole)
    tensors, others = contents(one), contents(other)
    assert [name for name in tensors if tensors[name] == others[name]] == []
    assert len(set(tensors.values())) == len(tensors)


def test_a_layer_is_the_same_in_a_model_of_more_layers(tmp_path: Path) -> None:
    fewer, more = contents(make(tmp_path / "2", FP8)), contents(make(tmp_path / "3", tiny_config()))
    assert set(more) > set(fewer) and all(more[name] == fewer[name] for name in fewer)


def test_shards_are_named_filled_and_aligned(folder: Path) -> None:
    index = json.loads((folder / INDEX).read_text("utf-8"))
    shards = sorted(folder.glob("*.safetensors"))
    count = len(shards)
    assert [s.name for s in shards] == [
        f"model-{i + 1:05d}-of-{count:06d}.safetensors" for i in range(count)
    ]
    stored = Checkpoint.open(folder).stored.values()
    assert index["metadata"]["total_size"] == sum(t.bytes for t in stored)
    for shard in shards:
        inside = [t for t in stored if t.shard == shard]
        assert sum(t.bytes for t in inside) <= SMALL_SHARDS or len(inside) == 1
    assert all(t.begin % t.dtype.itemsize == 0 for t in stored)


def test_the_progress_ends_at_the_total(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    write_synthetic(FP8, tmp_path / "c", 0, lambda name, done, total: seen.append((done, total)))
    assert [done for done, _ in seen] == sorted({done for done, _ in seen})
    assert len({total for _, total in seen}) == 1 and seen[-1][0] == seen[-1][1]


def test_a_run_that_broke_off_cannot_be_opened_and_is_written_over(tmp_path: Path) -> None:
    def break_off(name: str, done: int, total: int) -> None:
        if done > total / 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_synthetic(FP8, tmp_path / "c", 0, break_off, SMALL_SHARDS)
    with pytest.raises(ConfigError):
        Checkpoint.open(tmp_path / "c")
    assert {p.suffix for p in (tmp_path / "c").iterdir()} == {".safetensors", ".json"}
    make(tmp_path / "c", FP8, shard_bytes=10**9)
    assert contents(tmp_path / "c") == contents(make(tmp_path / "fresh", FP8))
    assert len(list((tmp_path / "c").glob("*.safetensors"))) == 1


def test_a_folder_with_other_files_is_refused_and_kept(tmp_path: Path) -> None:
    other = written(tmp_path / "trained", FP8)
    before = {p.name: p.read_bytes() for p in other.iterdir()}
    with pytest.raises(CheckpointError, match=f"{MARK}.*got other files"):
        make(other, BF16)
    assert {p.name: p.read_bytes() for p in other.iterdir()} == before


def test_too_small_a_disk_is_refused_before_anything_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = sum(len(content) for content in contents(make(tmp_path / "c", FP8)).values())
    usage = namedtuple("usage", "free")

    def free(amount: int) -> Callable[[Path], Any]:
        return lambda path: usage(amount)

    monkeypatch.setattr(shutil, "disk_usage", free(size - 1))
    with pytest.raises(CheckpointError, match=r"expected .* GB of free disk, got .* GB"):
        make(tmp_path / "new" / "c", FP8)
    assert not (tmp_path / "new").exists()
    make(tmp_path / "c", FP8)  # the earlier output gives way
    monkeypatch.setattr(shutil, "disk_usage", free(0))
    with pytest.raises(CheckpointError, match="GB of free disk"):
        make(tmp_path / "c", tiny_config(num_hidden_layers=4))
    Checkpoint.open(tmp_path / "c")


@pytest.mark.parametrize("preset", ["k2", "k2.5", "deepseek-v3"])
def test_a_preset_is_cut_down_to_the_given_sizes(preset: str) -> None:
    raw = load_raw_config(preset)
    config = ModelConfig.from_dict(reduced(raw, layers=3, dense=2, vocab=1024))
    assert (config.num_hidden_layers, config.count("dense"), config.vocab_size) == (3, 2, 1024)
    whole = ModelConfig.from_dict(raw)
    if whole.bos_token_id >= 1024:
        assert (config.bos_token_id, config.eos_token_id) == (1022, (1023,))
    else:
        assert (config.bos_token_id, config.eos_token_id) == (
            whole.bos_token_id,
            whole.eos_token_id,
        )
    assert config.hidden_size == whole.hidden_size and raw == load_raw_config(preset)
    assert reduced(raw) == raw


def test_layers_that_cannot_be_are_refused_and_dense_ones_fit_by_default(tmp_path: Path) -> None:
    raw = load_raw_config("deepseek-v3")
    assert ModelConfig.from_dict(reduced(raw, layers=1)).count("dense") == 1
    for layers, dense in ((2, 3), (0, None)):
        with pytest.raises(ConfigError, match=r"expected .*, got"):
            make(tmp_path / "c", reduced(raw, layers=layers, dense=dense))
    assert not (tmp_path / "c").exists()


def test_fp8_bytes_are_no_nan_and_use_every_other_code(tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(make(tmp_path / "c", FP8))
    names = [n for n in expected_tensors(checkpoint.config) if is_linear(n)]
    codes = torch.cat([checkpoint.stored[n].read().view(torch.uint8).flatten() for n in names])
    counts = torch.bincount(codes.to(torch.int64), minlength=256)
    assert counts[[0x7F, 0xFF]].tolist() == [0, 0]
    assert (counts > 0).sum() == 254
