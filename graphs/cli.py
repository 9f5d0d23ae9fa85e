"""What the packages' command lines share: how an error that the user can act on ends a command."""

import sys

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
)

from graphs.config_parts import ConfigError
from graphs.spec import BuildError


def make_app(summary: str) -> typer.Typer:
    """A command line whose errors `run` reports."""
    return typer.Typer(
        help=summary, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False
    )


def progress_bar() -> Progress:
    """On standard error, gone when done; nothing where that is no terminal."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    return Progress(
        *columns,
        TimeElapsedColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )


def run(app: typer.Typer, *errors: type[Exception]) -> None:
    """Run a command line; ConfigError, BuildError and `errors` end it with one line and exit 1.

    Anything else is a bug of ours and keeps its traceback.
    """
    known: tuple[type[Exception], ...] = (ConfigError, BuildError, *errors)
    try:
        app()
    except known as e:
        print(f"error: {' '.join(str(e).split())}", file=sys.stderr)
        sys.exit(1)
