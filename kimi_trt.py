"""The command `kimi-trt`: the runtime's commands, and those of `graphs` and `export` as groups.

    kimi-trt generate BUILD --prompt TEXT        the same as python -m runtime generate
    kimi-trt graphs describe k2                  the same as python -m graphs describe
    kimi-trt export weights --checkpoint DIR …   the same as python -m export weights

Each is imported when it is called: `export` needs packages that running a build does not.
"""

from typing import Annotated

import typer

from graphs.cli import make_lazy_app, run
from runtime.__main__ import COMMANDS
from runtime.commands.signals import Interruption, without_traceback

__version__ = "0.1.0"

GROUPS = {"graphs": "graphs.__main__:app", "export": "export.__main__:app"}


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"kimi-trt {__version__}")
        raise typer.Exit


Version = Annotated[
    bool,
    typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version."),
]


def _options(version: Version = False) -> None:
    """Holds the options that stand before a command."""


app = make_lazy_app(
    "Run a build of a Kimi K2 checkpoint, or make one.", COMMANDS | GROUPS, _options
)


def main() -> None:
    """Run the command line; errors that the user can act on end it with one line and status 1."""
    without_traceback()
    with Interruption() as interruption:
        run(app, find_errors=_error_types)
    interruption.leave()


def _error_types() -> tuple[type[Exception], ...]:
    from export.checkpoint.errors import CheckpointError
    from graphs.commands import ERRORS
    from runtime.commands.errors import error_types

    return CheckpointError, *ERRORS, *error_types()
