"""What the packages' command lines share: how an error that the user can act on ends a command."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import typer
from rich.console import Console
from rich.filesize import decimal
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from graphs.contract.rope_config import ConfigError
from graphs.contract.spec import BuildError


def make_app(summary: str) -> typer.Typer:
    """A command line whose errors `run` reports."""
    return typer.Typer(
        help=summary, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False
    )


def wide_console() -> Console:
    """For tables: as wide as the terminal, and 120 columns where there is none."""
    console = Console()
    return console if console.is_terminal else Console(width=120)


def progress_bar(*columns: ProgressColumn) -> Progress:
    """On standard error, gone when done; nothing where that is no terminal.

    Behind the bar stand `columns`, by default the steps and the time that they took.
    """
    console = Console(stderr=True)
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        *(columns or (MofNCompleteColumn(), TimeElapsedColumn())),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )


@contextmanager
def byte_progress(
    what: str,
) -> Iterator[tuple[Callable[[str, int, int], None], Callable[[str], None]]]:
    """How far a long piece of file work has come, with its rate and the time that remains.

    Yields what to call with a file's name, bytes done and bytes in all, and what prints a line. A
    bar on a terminal; elsewhere a line when a file is done.
    """
    start, current, reached = time.monotonic(), "", (0, 0)
    with progress_bar(DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn()) as progress:
        task = progress.add_task(what, total=None)

        def say(text: str) -> None:
            print(text, file=sys.stderr) if progress.disable else progress.print(text)

        def report() -> None:
            done, total = reached
            if progress.disable and current:
                rate = done / max(time.monotonic() - start, 1e-3)
                say(
                    f"{current}: {decimal(done)} of {decimal(total)}, {decimal(int(rate))}/s, "
                    f"{(total - done) / max(rate, 1):.0f} s remain"
                )

        def show(file: str, done: int, total: int) -> None:
            nonlocal current, reached
            if file != current:
                report()
            current, reached = file, (done, total)
            progress.update(task, description=file, completed=done, total=total)

        yield show, say
        report()


def run(
    app: typer.Typer,
    *errors: type[Exception],
    find_errors: Callable[[], tuple[type[Exception], ...]] = tuple,
) -> None:
    """Run a command line; ConfigError, BuildError and `errors` end it with one line and exit 1.

    `find_errors` returns more of them, and is called only when one was raised: importing them may
    take long. Anything else is a bug of ours and keeps its traceback.
    """
    try:
        app()
    except Exception as e:
        if not isinstance(e, (ConfigError, BuildError, *errors, *find_errors())):
            raise
        print(f"error: {' '.join(str(e).split())}", file=sys.stderr)
        sys.exit(1)
