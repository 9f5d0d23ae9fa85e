"""What tells checkpoints apart, and that a build is of one checkpoint, whatever its name."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from export.__main__ import app
from export.checkpoint import identity
from export.checkpoint.errors import CheckpointError
from export.checkpoint.identity import SAMPLE, CheckpointIdentity
from export.checkpoint.open import Checkpoint
from export.golden.layer import write_layer_goldens
from export.golden.model import write_goldens
from export.packing.pack import pack
from export.packing.record import RECORD_FILE, BuildRecord, record_checkpoint
from graphs.contract.spec import HEAD_FILE, BuildError, BuildSpec
from graphs.contract.tensorfile import read_header
from tests.support.helpers import tiny_checkpoint
from tests.support.shared_builds import export_once

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("record") / "A" / "ck")


@pytest.fixture(scope="module")
def packed(original: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An fp8 build of the original. Tests copy it."""
    build = tmp_path_factory.mktemp("record") / "fp8"
    checkpoint = Checkpoint.open(original)
    export_once(checkpoint.raw_config, "fp8", build)
    pack(checkpoint, build)
    return build


@pytest.fixture
def folder(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "B" / "ck"))


@pytest.fixture
def build(packed: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(packed, tmp_path / "build"))


def first_shard(folder: Path) -> Path:
    return min(folder.glob("*.safetensors"))


def poke(path: Path, offset: int) -> None:
    """Change one byte and keep size and times."""
    status, content = path.stat(), bytearray(path.read_bytes())
    content[offset] ^= 1
    path.write_bytes(content)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def poke_tensor(folder: Path, place: str) -> None:
    """Change a byte of the checkpoint's largest tensor, which a sample does not cover whole."""
    stored = Checkpoint.open(folder).stored.values()
    tensor = max(stored, key=lambda t: t.bytes)
    offset = {"first": 0, "middle": tensor.bytes // 2, "last": tensor.bytes - 1}[place]
    assert tensor.bytes > 3 * SAMPLE
    poke(tensor.shard, tensor.begin + offset)


def rename_tensor(folder: Path) -> None:
    shard = first_shard(folder)
    tensors = load_file(shard)
    tensors["more"] = tensors[min(tensors)].clone()
    save_file(tensors, shard)


def change_config(folder: Path) -> None:
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(raw | {"rope_theta": 10000.0}))


CHANGES: list[tuple[str, Callable[[Path], object]]] = [
    ("another config.json", change_config),
    ("other values in model-0000", lambda folder: poke_tensor(folder, "first")),
    ("other values in model-0000", lambda folder: poke_tensor(folder, "middle")),
    ("other values in model-0000", lambda folder: poke_tensor(folder, "last")),
    ("other tensors in model-00001", rename_tensor),
    ("another chat_template.jinja", lambda f: (f / "chat_template.jinja").write_text("{{ a }}")),
    ("another generation_config.json", lambda f: (f / "generation_config.json").write_text("{}")),
]


@pytest.mark.parametrize(("words", "change"), CHANGES)
def test_each_change_makes_another_checkpoint_and_is_named(
    original: Path, folder: Path, words: str, change: Callable[[Path], object]
) -> None:
    before = CheckpointIdentity.from_folder(original)
    change(folder)
    after = CheckpointIdentity.from_folder(folder, before.shards)
    assert after.fingerprint != before.fingerprint
    assert before.difference(after).startswith(words)


def test_neither_place_nor_times_nor_spacing_make_another_checkpoint(
    original: Path, folder: Path
) -> None:
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(raw, indent=7))
    for path in folder.iterdir():
        os.utime(path, (1e9, 1e9))
    before, after = map(CheckpointIdentity.from_folder, (original, folder))
    assert after.fingerprint == before.fingerprint
    assert before.difference(after) == "no difference"


def test_a_shard_that_nobody_touched_is_not_read_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = CheckpointIdentity.from_folder(folder)
    headers: list[Path] = []

    def read(path: Path) -> tuple[dict[str, Any], int]:
        headers.append(path)
        return read_header(path)

    monkeypatch.setattr("export.checkpoint.identity.read_header", read)
    assert CheckpointIdentity.from_folder(folder, before.shards) == before and headers == []
    shard = first_shard(folder)
    poke(shard, -1)
    assert CheckpointIdentity.from_folder(folder, before.shards) != before and headers == [shard]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda f: first_shard(f).unlink(), r"model-00001.*: expected a shard: No such file"),
        (lambda f: first_shard(f).write_bytes(b"x"), "not a complete safetensors file"),
        (lambda f: (f / identity.INDEX).write_text("[]"), "expected a JSON object with 'weight_"),
    ],
)
def test_a_bad_checkpoint_has_no_identity(
    folder: Path, build: Path, damage: Callable[[Path], object], message: str
) -> None:
    before = (build / RECORD_FILE).read_text()
    damage(folder)
    with pytest.raises(CheckpointError, match=message):
        record_checkpoint(folder, build)
    assert (build / RECORD_FILE).read_text() == before and (build / HEAD_FILE).exists()


def test_packing_records_the_checkpoint_and_a_folder_that_moved_is_accepted(
    original: Path, folder: Path, build: Path
) -> None:
    record = BuildRecord.load(build)
    assert record is not None and record.path == str(original)
    before = {path: path.stat().st_mtime_ns for path in build.rglob("*") if path.is_file()}
    pack(Checkpoint.open(folder), build)
    assert record_checkpoint(folder, build) is None
    after = {path: path.stat().st_mtime_ns for path in build.rglob("*") if path.is_file()}
    assert {p: t for p, t in after.items() if p.parent.name != "tokenizer"} == before
    poke_tensor(folder, "middle")
    with pytest.raises(BuildError, match="which has other values in model-00001-of-000002"):
        pack(Checkpoint.open(folder), build)


def test_the_records_time_changes_with_the_shards_times_only(folder: Path, build: Path) -> None:
    path = build / RECORD_FILE
    os.utime(path, (1e9, 1e9))
    first_shard(folder).chmod(0o600)  # its inode says so
    assert record_checkpoint(folder, build) is None and path.stat().st_mtime == 1e9
    record = BuildRecord.load(build)
    assert record is not None and record.path == str(folder)
    os.utime(first_shard(folder), (1e9, 1e9))
    assert record_checkpoint(folder, build) is None and path.stat().st_mtime > 1e9


def test_weights_and_goldens_of_another_checkpoint_are_refused_naming_both(
    original: Path, folder: Path, build: Path
) -> None:
    poke_tensor(folder, "middle")
    other = Checkpoint.open(folder)
    before = {path: path.read_bytes() for path in build.rglob("*") if path.is_file()}
    for refused in (pack, write_goldens, write_layer_goldens):
        with pytest.raises(BuildError) as caught:
            refused(other, build)
        assert str(caught.value) == (
            f"{build}: expected the checkpoint that this build is made of, {original}, got "
            f"{folder}, which has other values in model-00001-of-000002.safetensors; choose "
            "another --out, or make it that checkpoint's build with `python -m export record "
            f"--checkpoint {folder} --out {build}`"
        )
    assert {path: path.read_bytes() for path in build.rglob("*") if path.is_file()} == before


def test_another_checkpoint_takes_the_place_of_the_first(
    original: Path, folder: Path, build: Path
) -> None:
    """What the first one's weights are in goes at once, so that nothing runs by mistake."""
    poke_tensor(folder, "first")
    for name in ("golden", "parity"):
        (build / name).mkdir()
    result = CliRunner().invoke(
        app, ["record", "--checkpoint", str(folder), "--out", str(build)], catch_exceptions=False
    )
    change = "other values in model-00001-of-000002.safetensors"
    assert result.stderr == f"{build}: {folder} replaces {original}: {change}\n"
    assert not any((build / name).exists() for name in (HEAD_FILE, "golden", "parity"))
    with pytest.raises(BuildError, match=f"of, {folder}, got {original}"):
        pack(Checkpoint.open(original), build)
    pack(Checkpoint.open(folder), build)
    assert all((build / name).is_file() for name in BuildSpec.load(build).weight_files)


def test_a_build_without_a_record_is_packed_and_recorded(folder: Path, build: Path) -> None:
    (build / RECORD_FILE).unlink()
    poke_tensor(folder, "last")
    pack(Checkpoint.open(folder), build)
    record = BuildRecord.load(build)
    assert record is not None and record.path == str(folder)


@pytest.mark.parametrize("content", ["{", "[]", '{"format": 0}', '{"format": 1}'])
def test_a_damaged_record_is_refused_by_packing_and_replaced_by_recording(
    folder: Path, build: Path, content: str
) -> None:
    (build / RECORD_FILE).write_text(content)
    with pytest.raises(BuildError, match=r"checkpoint\.json: .*; remove it and pack"):
        pack(Checkpoint.open(folder), build)
    record_checkpoint(folder, build)
    assert BuildRecord.load(build) is not None


def test_recording_imports_no_torch(original: Path, tmp_path: Path) -> None:
    """Every make records, so it has to start quickly."""
    script = (
        "import sys\nfrom export.__main__ import app\n"
        "app(sys.argv[1:], standalone_mode=False)\nassert 'torch' not in sys.modules"
    )
    arguments = ["record", "--checkpoint", str(original), "--out", str(tmp_path / "build")]
    subprocess.run([sys.executable, "-c", script, *arguments], cwd=ROOT, check=True)
    assert (tmp_path / "build" / RECORD_FILE).is_file()
