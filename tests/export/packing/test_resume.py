"""Packing interrupted, repeated, refused or shared between workers: always the same bytes."""

import fcntl
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from export.checkpoint.block_fp8 import channels_from_wide
from export.checkpoint.open import Checkpoint
from export.checkpoint.shards import CheckpointError
from export.packing import packed_file, staging
from export.packing.pack import PackingPlan, pack
from export.packing.record import record_checkpoint
from export.packing.staging import STAGING
from graphs.__main__ import app
from graphs.contract.spec import HEAD_FILE, BuildError, BuildSpec, config_hash, layer_file
from graphs.contract.tensorfile import TensorFile
from runtime.devices.weights import Weights
from tests.support.helpers import INT4, tiny_checkpoint
from tests.support.shared_builds import export_once

ROOT = Path(__file__).parents[3]
FILES = 6  # embedding, three layers, head, rope


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("tiny") / "checkpoint", shards=4)


@pytest.fixture(scope="module")
def exported(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Graphs without weights."""
    build = tmp_path_factory.mktemp("tiny") / "exported"
    export_once(Checkpoint.open(folder).raw_config, "fp8", build)
    return build


@pytest.fixture(scope="module")
def packed(folder: Path, exported: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What one undisturbed run makes."""
    build = Path(shutil.copytree(exported, tmp_path_factory.mktemp("tiny") / "packed"))
    pack(Checkpoint.open(folder), build, workers=1)
    return build


@pytest.fixture
def build(exported: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(exported, tmp_path / "build"))


def contents(build: Path) -> dict[str, bytes]:
    """Everything but the stamps, which have the checkpoint's times in them."""
    files = (p for p in build.rglob("*") if p.is_file() and p.suffix != ".source")
    return {str(p.relative_to(build)): p.read_bytes() for p in files}


def inodes(build: Path) -> dict[str, int]:
    """A file that is made anew has another inode."""
    return {name: (build / name).stat().st_ino for name in BuildSpec.load(build).weight_files}


def remade(before: dict[str, int], build: Path) -> set[str]:
    return {name for name, inode in inodes(build).items() if before[name] != inode}


@pytest.mark.parametrize("workers", [1, 2, 7])
def test_workers_do_not_change_a_byte(
    folder: Path, build: Path, packed: Path, workers: int
) -> None:
    pack(Checkpoint.open(folder), build, workers)
    assert contents(build) == contents(packed)


def test_pieces_do_not_change_a_byte(
    folder: Path, build: Path, packed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packed_file, "PIECE", 1000)  # three rows of the embedding
    pack(Checkpoint.open(folder), build)
    assert contents(build) == contents(packed)


KILLED = """
import os, signal, sys
from pathlib import Path
from export.checkpoint.open import Checkpoint
from export.packing.pack import pack

def kill(file, done, total):
    if done >= total * float(sys.argv[3]):
        os.kill(os.getpid(), signal.SIGKILL)

pack(Checkpoint.open(Path(sys.argv[1])), Path(sys.argv[2]), 2, kill)
"""


@pytest.mark.parametrize(
    "share", [0.5, *(pytest.param(share, marks=pytest.mark.slow) for share in (0.1, 0.99))]
)
def test_a_killed_run_goes_on_where_it_stopped(
    folder: Path, build: Path, packed: Path, share: float
) -> None:
    killed = [sys.executable, "-c", KILLED, str(folder), str(build), str(share)]
    assert subprocess.run(killed, cwd=ROOT, check=False).returncode == -signal.SIGKILL
    assert not (build / HEAD_FILE).exists()
    plans: list[PackingPlan] = []
    leftovers: set[Path] = set()

    def look(file: str, done: int, total: int) -> None:
        partial = set((build / STAGING).rglob("*.tmp"))
        leftovers.update(p for p in partial if not p.name.endswith(f".{os.getpid()}.tmp"))

    pack(Checkpoint.open(folder), build, progress=look, started=plans.append)
    (plan,) = plans
    assert not leftovers
    done = FILES - len(plan.todo)
    assert f"{done} of {FILES} files are finished" in plan.summary() if done else share < 0.5
    assert contents(build) == contents(packed)
    assert not (build / STAGING).exists()


def test_what_is_finished_is_not_made_again(folder: Path, build: Path) -> None:
    checkpoint = Checkpoint.open(folder)
    pack(checkpoint, build)
    before = inodes(build)
    pack(checkpoint, build)
    assert remade(before, build) == set()
    (build / layer_file(1)).unlink()
    before[layer_file(1)] = -1
    pack(checkpoint, build)
    assert remade(before, build) == {layer_file(1)}
    before = inodes(build)
    path = build / layer_file(2)
    path.write_bytes(path.read_bytes()[:-1])
    pack(checkpoint, build)
    assert remade(before, build) == {layer_file(2)}


def test_a_shard_that_changed_is_packed_again(folder: Path, tmp_path: Path, build: Path) -> None:
    copy = Path(shutil.copytree(folder, tmp_path / "checkpoint"))
    pack(Checkpoint.open(copy), build)
    before = inodes(build)
    shard = Checkpoint.open(copy).stored["model.embed_tokens.weight"].shard
    stat = shard.stat()
    os.utime(shard, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1))
    pack(Checkpoint.open(copy), build)
    assert "weights/embed.safetensors" in remade(before, build)
    assert "rope.safetensors" not in remade(before, build)


def test_other_weights_of_the_same_config_replace_all(
    folder: Path, tmp_path: Path, build: Path
) -> None:
    pack(Checkpoint.open(folder), build)
    before = inodes(build)
    other = tiny_checkpoint(tmp_path / "other", seed=1)
    record_checkpoint(other, build)
    pack(Checkpoint.open(other), build)
    assert remade(before, build) == {*before} - {"rope.safetensors"}


def test_other_values_under_the_same_names_sizes_and_times_replace_all(
    folder: Path, tmp_path: Path, build: Path
) -> None:
    """The shards of another fine-tune, copied over the first one's with their times kept."""
    copy = Path(shutil.copytree(folder, tmp_path / "checkpoint"))
    pack(Checkpoint.open(copy), build)
    before = inodes(build)
    other = tiny_checkpoint(tmp_path / "other", seed=1, shards=4)
    for shard in copy.glob("*.safetensors"):
        status = shard.stat()
        shutil.copyfile(other / shard.name, shard)
        os.utime(shard, ns=(status.st_atime_ns, status.st_mtime_ns))
        assert shard.stat().st_size == status.st_size
    with pytest.raises(BuildError, match=r"which has other values in model-00001"):
        pack(Checkpoint.open(copy), build)
    record_checkpoint(copy, build)
    pack(Checkpoint.open(copy), build)
    assert remade(before, build) == {*before} - {"rope.safetensors"}


def test_layers_that_a_shorter_model_lacks_are_removed(
    folder: Path, tmp_path: Path, build: Path
) -> None:
    pack(Checkpoint.open(folder), build)
    shorter = Checkpoint.open(tiny_checkpoint(tmp_path / "shorter", num_hidden_layers=2))
    raw = shorter.raw_config  # whose graphs are the same
    replace(BuildSpec.load(build), raw_config=raw, config_sha256=config_hash(raw)).save(build)
    record_checkpoint(shorter.folder, build)
    pack(shorter, build)
    names = {path.name for path in (build / "weights").iterdir() if path.name[0] != "."}
    assert names == {Path(name).name for name in BuildSpec.load(build).weight_files[:-1]}


def test_a_bad_shard_can_be_replaced_and_the_run_goes_on(
    folder: Path, tmp_path: Path, build: Path
) -> None:
    copy = Path(shutil.copytree(folder, tmp_path / "checkpoint"))
    shard = Checkpoint.open(copy).stored["model.layers.2.input_layernorm.weight"].shard
    whole = shard.read_bytes()
    tensors = load_file(shard)
    tensors["model.layers.2.input_layernorm.weight"][3] = torch.nan
    save_file(tensors, shard)
    with pytest.raises(CheckpointError, match="NaN or infinity"):
        pack(Checkpoint.open(copy), build)
    assert not (build / "weights").exists()
    staged = (build / STAGING / layer_file(0)).stat().st_ino
    shard.write_bytes(whole)
    pack(Checkpoint.open(copy), build)
    assert (build / layer_file(0)).stat().st_ino == staged


def test_what_an_interrupted_run_left_of_another_checkpoint_is_not_moved_in(
    folder: Path, tmp_path: Path, build: Path, packed: Path
) -> None:
    pack(Checkpoint.open(folder), build)

    def interrupt(file: str, done: int, total: int) -> None:
        if file == layer_file(1):
            raise KeyboardInterrupt

    other = Checkpoint.open(tiny_checkpoint(tmp_path / "other", seed=1))
    record_checkpoint(other.folder, build)
    with pytest.raises(KeyboardInterrupt):
        pack(other, build, progress=interrupt)
    assert (build / STAGING / layer_file(0)).is_file()
    record_checkpoint(folder, build)
    pack(Checkpoint.open(folder), build)
    assert contents(build) == contents(packed)


def test_a_build_that_was_left_between_two_checkpoints_is_not_loaded(
    folder: Path, tmp_path: Path, build: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pack(Checkpoint.open(folder), build)
    other = Checkpoint.open(tiny_checkpoint(tmp_path / "other", seed=1))
    record_checkpoint(other.folder, build)
    move, moved = staging._move, iter(range(3))

    def interrupted(*args: object) -> None:
        if next(moved) == 2:
            raise KeyboardInterrupt
        move(*args)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(staging, "_move", interrupted)
        with pytest.raises(KeyboardInterrupt):
            pack(other, build)
    spec = BuildSpec.load(build)
    with pytest.raises(BuildError, match=r"head\.safetensors"):
        Weights.open(build, spec)
    pack(other, build)
    Weights.open(build, spec)
    fresh = Path(shutil.copytree(build, tmp_path / "fresh"))
    shutil.rmtree(fresh / "weights")
    pack(other, fresh)
    assert contents(fresh) == contents(build)


def test_two_processes_do_not_pack_into_one_folder(folder: Path, build: Path) -> None:
    held = os.open(build, os.O_RDONLY)
    fcntl.flock(held, fcntl.LOCK_EX)
    with pytest.raises(BuildError, match="another process packs into this folder"):
        pack(Checkpoint.open(folder), build)
    os.close(held)
    pack(Checkpoint.open(folder), build)


def test_too_small_a_disk_is_refused_before_anything_is_written(
    folder: Path, build: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = contents(build)
    usage = shutil.disk_usage(build)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    with pytest.raises(BuildError, match=r"MB of free disk for 6 files, got 1\.0 kB"):
        pack(Checkpoint.open(folder), build)
    assert contents(build) == before


def test_int4_experts_become_fp8_and_the_summary_says_that_they_grow(tmp_path: Path) -> None:
    path = tiny_checkpoint(tmp_path / "checkpoint", quantization_config=INT4)
    checkpoint, build = Checkpoint.open(path), tmp_path / "build"
    export_once(checkpoint.raw_config, "fp8", build)
    plans: list[PackingPlan] = []
    pack(checkpoint, build, started=plans.append)
    assert "INT4 experts take twice the bytes as FP8" in plans[0].summary()
    file = TensorFile.open(build / layer_file(1))
    for part, sources in {"gate_up": ("gate_proj", "up_proj"), "down": ("down_proj",)}.items():
        names = [f"model.layers.1.mlp.experts.5.{source}.weight" for source in sources]
        channels = [channels_from_wide(checkpoint.wide(name)) for name in names]
        scale = torch.cat([c.scale for c in channels]).numpy()
        assert (file[f"experts.5.{part}.scale"] == scale).all()
        codes = torch.cat([c.weight.view(torch.uint8) for c in channels]).numpy()
        assert (file[f"experts.5.{part}.weight"].view("uint8") == codes).all()


@pytest.fixture
def copy(packed: Path, tmp_path: Path) -> Iterator[Path]:
    yield Path(shutil.copytree(packed, tmp_path / "copy"))


def test_verifying_a_build_names_the_file_and_tensor_that_changed(copy: Path) -> None:
    result = CliRunner().invoke(app, ["verify", str(copy)])
    assert result.exit_code == 0 and f"{FILES} files are as they were written" in result.output
    path = copy / layer_file(2)
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(
        BuildError, match=r"layer_002.safetensors: experts\.7\.down\.\w+: expected sha256"
    ):
        CliRunner().invoke(app, ["verify", str(copy)], catch_exceptions=False)
