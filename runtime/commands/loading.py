"""Opening a build with a progress bar."""

from pathlib import Path

from rich.filesize import decimal
from rich.progress import TextColumn, TimeElapsedColumn

from graphs.cli import progress_bar
from runtime.load import LoadOptions, open_chain
from runtime.step.chain import Chain


def load(build: Path, options: LoadOptions) -> Chain:
    """Open a build, with a progress bar on standard error. Raises as `open_chain`."""
    with progress_bar(TextColumn("{task.fields[bytes]}"), TimeElapsedColumn()) as bar:
        task = bar.add_task("loading", total=None, bytes="")

        def progress(what: str, done: int, total: int) -> None:
            text = f"{decimal(done)} of {decimal(total)}"
            bar.update(task, description=what, completed=done, total=total, bytes=text)

        return open_chain(build, options, progress)
