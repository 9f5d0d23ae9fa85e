"""Files that are there whole or not at all: written under a temporary name, then renamed."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """The temporary path to write; it takes `path`'s place at the end, or goes where that fails.

    The name holds the process's number, so two writers never share one. Raises OSError.
    """
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """UTF-8, whole or not at all. Raises OSError."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")
