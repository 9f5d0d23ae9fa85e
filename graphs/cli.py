"""Shared parts of the packages' command lines: apps, progress, and errors that end a command."""

import importlib
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NoReturn

import typer
import typer.core
import typer.main
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

# The extra of pyproject.toml that brings each package that is not always there.
EXTRAS = {
    **dict.fromkeys(("torch", "numba", "onnx_ir", "onnxscript"), "export"),
    **dict.fromkeys(("tensorrt_rtx", "polygraphy", "onnx_graphsurgeon"), "compile"),
    "tensorrt": "tensorrt",
}


def make_app(summary: str) -> typer.Typer:
    """A command line whose errors `run` reports."""
    return typer.Typer(
        help=summary, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False
    )


def make_lazy_app(
    summary: str, commands: Mapping[str, str], options: Callable[..., None] = lambda: None
) -> typer.Typer:
    """A command line whose commands are imported when one is called, or all for `--help`.

    `commands`: each command's name, and the function or app behind it as `module:attribute`.
    `options`: a function whose parameters are the options before a command.
    """

    class LazyCommands(typer.core.TyperGroup):
        def list_commands(self, ctx: Any) -> list[str]:
            return list(commands)

        def get_command(self, ctx: Any, cmd_name: str) -> Any:
            if cmd_name not in commands:
                return None
            module, _, attribute = commands[cmd_name].partition(":")
            command = getattr(importlib.import_module(module), attribute)
            if isinstance(command, typer.Typer):
                return typer.main.get_group(command)
            app = make_app("")
            app.command(cmd_name)(command)
            return typer.main.get_command(app)

    app = make_app(summary)
    app.callback(cls=LazyCommands)(options)  # without it a Typer app needs a command
    return app


def wide_console() -> Console:
    """A console for tables: as wide as the terminal, and 120 columns where there is none."""
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
    """Show the progress of long work on files, with its rate and the time that remains.

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
    take long. A package that an extra would bring ends it likewise; anything else is a bug of ours
    and keeps its traceback.
    """
    try:
        app()
    except ModuleNotFoundError as e:
        if (extra := EXTRAS.get((e.name or "").split(".")[0])) is None:
            raise
        _fail(
            f"{e.name}: expected this package, which is not installed; do pip install '.[{extra}]' "
            "in the folder of kimi-trt's sources"
        )
    except Exception as e:
        if not isinstance(e, (ConfigError, BuildError, *errors, *find_errors())):
            raise
        _fail(str(e))


def _fail(message: str) -> NoReturn:
    print(f"error: {' '.join(message.split())}", file=sys.stderr)
    sys.exit(1)
