"""The store of shared builds: made once, found again, and seen to be changed."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.shared_builds import PACKAGES, SOURCES, BuildStore, sources_digest

ROOT = Path(__file__).parents[1]

# Builds in the store of argument 1, slowly, and writes a line to argument 2 when it does.
BUILDING = """
import sys, time
from pathlib import Path
from tests.support.shared_builds import BuildStore

def make(folder):
    with open(sys.argv[2], "a") as log:
        log.write("made\\n")
    folder.mkdir(parents=True)
    time.sleep(0.5)
    (folder / "file").write_text("content")

print((BuildStore(Path(sys.argv[1]), "sources").build("fp32", "inputs", make) / "file").read_text())
"""


def make(folder: Path) -> None:
    folder.mkdir(parents=True)
    (folder / "file").write_text("content")


def test_two_processes_that_need_a_build_at_once_make_it_once(tmp_path: Path) -> None:
    command = [sys.executable, "-c", BUILDING, str(tmp_path / "store"), str(tmp_path / "log")]
    processes = [
        subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) for _ in range(2)
    ]
    assert [process.communicate()[0] for process in processes] == ["content\n"] * 2
    assert (tmp_path / "log").read_text() == "made\n"


def test_other_inputs_make_another_build_and_a_failed_one_is_made_again(tmp_path: Path) -> None:
    store = BuildStore(tmp_path, "sources")

    def fail(folder: Path) -> None:
        make(folder)
        raise OSError

    with pytest.raises(OSError):
        store.build("fp32", "a", fail)
    first = store.build("fp32", "a", make)
    assert first == store.build("fp32", "a", fail) and first.name == "fp32"
    assert len({first, store.build("fp32", "b", make), store.build("fp8", "a", make)}) == 3


def test_a_changed_added_or_deleted_file_is_named_and_its_build_made_anew(tmp_path: Path) -> None:
    store = BuildStore(tmp_path, "sources")
    changes: dict[str, Callable[[Path], object]] = {
        "file": lambda build: (build / "file").write_text("changed"),
        "new": lambda build: (build / "new").write_text(""),
        "deleted": lambda build: (build / "file").unlink(),
    }
    for name, change in changes.items():
        build = store.build(name, "inputs", make)
        assert store.changed_files() == []
        change(build)
        file = build / ("new" if name == "new" else "file")
        assert store.changed_files() == [str(file)]
        assert (store.build(name, "inputs", make) / "file").read_text() == "content"


def test_a_store_of_other_sources_is_removed_once_nobody_has_it_open(tmp_path: Path) -> None:
    store = BuildStore(tmp_path, "old")
    BuildStore(tmp_path, "new").close()
    assert store.folder.exists()
    store.close()
    BuildStore(tmp_path, "new").close()
    assert not store.folder.exists()


def test_each_source_changes_the_digest(tmp_path: Path) -> None:
    files = [tmp_path / (s if s.endswith(".py") else f"{s}/deep/module.py") for s in SOURCES]
    for file in files:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("")
    digests = [sources_digest(tmp_path)]
    for file in files:
        file.write_text("changed")
        digests.append(sources_digest(tmp_path))
    assert len(set(digests)) == len(SOURCES) + 1 and "torch" in PACKAGES
