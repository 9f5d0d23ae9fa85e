"""The folder beside a build in which its weights are made, and how they get into the build."""

import fcntl
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from export.checkpoint.identity import GENERATION_CONFIG, TOKENIZER_FILES
from export.packing.packed_file import PackedFile
from graphs.contract.spec import HEAD_FILE, BuildError

STAGING = ".packing"


def move_in(staging: Path, build: Path, files: Sequence[PackedFile]) -> None:
    """Move what was made into the build, and remove weights that are no longer part of it.

    The head comes last: a build that was left halfway lacks it, and is not loaded.
    """
    for folder in ("weights", "tokenizer"):
        (build / folder).mkdir(exist_ok=True)
    made = [file for file in files if (staging / file.path).is_file()]
    if made:
        head = next(file for file in files if file.path == HEAD_FILE)
        if head not in made:
            _move(head, build, staging)
        (build / HEAD_FILE).unlink(missing_ok=True)
        for file in (*(f for f in made if f is not head), head):
            _move(file, staging, build)
    parts = {path for f in files for path in (build / f.path, f.stamp(build))}
    for path in {*(build / "weights").iterdir()} - parts:
        path.unlink()
    shutil.rmtree(build / "tokenizer")
    (staging / "tokenizer").replace(build / "tokenizer")
    if (staging / GENERATION_CONFIG).is_file():
        (staging / GENERATION_CONFIG).replace(build / GENERATION_CONFIG)
    else:
        (build / GENERATION_CONFIG).unlink(missing_ok=True)
    shutil.rmtree(staging)


def _move(file: PackedFile, source: Path, target: Path) -> None:
    (source / file.path).replace(target / file.path)
    file.stamp(source).replace(file.stamp(target))


def copy_tokenizer(source: Path, folder: Path) -> list[str]:
    """Copy what there is; returns the paths from the build folder."""
    shutil.rmtree(folder / "tokenizer", ignore_errors=True)
    (folder / GENERATION_CONFIG).unlink(missing_ok=True)
    (folder / "tokenizer").mkdir()
    targets = {name: f"tokenizer/{name}" for name in TOKENIZER_FILES}
    targets[GENERATION_CONFIG] = GENERATION_CONFIG
    present = {name: file for name, file in targets.items() if (source / name).is_file()}
    for name, file in present.items():
        shutil.copyfile(source / name, folder / file)
    return list(present.values())


@contextmanager
def locked(build: Path) -> Iterator[None]:
    """Hold the build folder for this process alone. Raises BuildError where another one packs."""
    if not build.is_dir():
        raise BuildError(f"{build}: no such folder; make it with `python -m export graphs`")
    descriptor = os.open(build, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError as e:
        raise BuildError(f"{build}: another process packs into this folder; wait for it") from e
    finally:
        os.close(descriptor)
