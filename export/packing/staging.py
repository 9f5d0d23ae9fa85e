"""The folder beside a build in which its weights are made, and how they get into the build."""

import fcntl
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from export.packing.packed_file import PackedFile
from graphs.contract.spec import HEAD_FILE, BuildError

STAGING = ".packing"

# What a checkpoint may bring along; without any of these the runtime's tokenizer is bytes.
TOKENIZER_FILES = (
    "tiktoken.model",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
)
GENERATION_CONFIG = "generation_config.json"


def move_in(staging: Path, build: Path, files: Iterable[PackedFile]) -> None:
    """Into the build, the head last: a build that was left halfway lacks it, and is not loaded."""
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
    wanted = {name: f"tokenizer/{name}" for name in TOKENIZER_FILES}
    wanted[GENERATION_CONFIG] = GENERATION_CONFIG
    present = {name: file for name, file in wanted.items() if (source / name).is_file()}
    for name, file in present.items():
        shutil.copyfile(source / name, folder / file)
    return list(present.values())


@contextmanager
def locked(build: Path) -> Iterator[None]:
    """Hold the build folder for this process alone. Raises BuildError where another one packs."""
    if not build.is_dir():
        raise BuildError(f"{build}: no such folder; make it with `python -m export graphs`")
    folder = os.open(build, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError as e:
        raise BuildError(f"{build}: another process packs into this folder; wait for it") from e
    finally:
        os.close(folder)
