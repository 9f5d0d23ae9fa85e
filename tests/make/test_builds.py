"""Builds by make itself of tiny checkpoints: one name, whichever checkpoint has it at the time."""

import os
import shutil
from pathlib import Path

import pytest

from graphs.contract.spec import BuildSpec
from tests.support.helpers import tiny_checkpoint
from tests.support.make_tree import MakeTree, stages

pytestmark = pytest.mark.slow

PRECISION = "fp32"


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> MakeTree:
    return MakeTree(tmp_path_factory.mktemp("builds"), stub=False)


def generate(tree: MakeTree, model: str, **changes: str) -> tuple[str, set[str]]:
    """The text that `make generate` wrote, and what was built for it."""
    assigned = {"MODEL": model, "PRECISION": PRECISION, "MAX_NEW_TOKENS": "12"} | changes
    done = tree.run("generate", *(f"{name}={value}" for name, value in assigned.items()))
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1], stages(done.stdout)


def test_a_build_follows_its_checkpoint_and_not_its_name(tree: MakeTree) -> None:
    """Case 22: B's files are older than what was built of A; then other files under B's name."""
    folder = tree.folder
    tiny_checkpoint(folder / "A" / "ck")
    tiny_checkpoint(folder / "B" / "ck", seed=1)
    tiny_checkpoint(folder / "C" / "ck", seed=2, num_hidden_layers=2)
    for path in (folder / "B").rglob("*"):
        os.utime(path, (1e9, 1e9))
    b_alone, built = generate(tree, "B/ck", NAME="alone")
    assert built == {"export graphs", "export weights"}
    a, _ = generate(tree, "A/ck")
    b, built = generate(tree, "B/ck")
    assert b == b_alone != a and built == {"export weights"}

    for shard in (folder / "B" / "ck").glob("*.safetensors"):
        status = shard.stat()
        shutil.copyfile(folder / "A" / "ck" / shard.name, shard)
        os.utime(shard, ns=(status.st_atime_ns, status.st_mtime_ns))
    again, built = generate(tree, "B/ck")
    assert again == a and built == {"export weights"}

    (folder / "moved").mkdir()
    (folder / "B" / "ck").rename(folder / "moved" / "ck")
    assert generate(tree, "moved/ck") == (a, set())

    c, built = generate(tree, "C/ck")
    assert c not in (a, b) and built == {"export graphs", "export weights"}
    build = folder / "build" / "ck" / PRECISION
    assert BuildSpec.load(build).config.num_hidden_layers == 2
    assert not (build / "weights" / "layer_002.safetensors").exists()


def build_files(build: Path) -> dict[str, bytes]:
    """What a build consists of, without the checkpoint's place and the engines' times."""
    names = ("*.onnx", "*.safetensors", "spec.json")
    return {
        str(path.relative_to(build)): path.read_bytes()
        for name in names
        for path in build.rglob(name)
    }


def test_two_makes_from_nothing_make_one_build(tree: MakeTree) -> None:
    """Case 34, up to the engines."""
    tiny_checkpoint(tree.folder / "two" / "ck")
    arguments = ["MODEL=two/ck", f"PRECISION={PRECISION}", "BATCH=1", "TOKENS=16", "CONTEXT=64"]
    both = [tree.start("engines", *arguments, "NAME=two", "TARGET=sm120") for _ in range(2)]
    outputs = [process.communicate(timeout=900)[0] for process in both]
    assert [process.returncode for process in both] == [0, 0], outputs
    assert sum("waiting for process" in output for output in outputs) == 1
    exported = [output.count("-m export weights") for output in outputs]
    assert sorted(exported) == [0, 1], outputs
    done = tree.run("weights", "golden", *arguments, "NAME=alone2")
    assert done.returncode == 0, done.stderr
    build = tree.folder / "build"
    assert build_files(build / "two" / PRECISION) == build_files(build / "alone2" / PRECISION)
