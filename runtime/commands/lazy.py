"""Commands whose module is imported when one is run or its own help is shown, not before."""

from collections.abc import Callable
from importlib import import_module
from typing import Any

import typer
from typer.core import TyperCommand

from graphs.cli import make_app


class LazyCommand(TyperCommand):
    """A command with a name and a summary, whose callback returns the function that it runs."""

    def make_context(self, *arguments: Any, **extra: Any) -> Any:
        assert self.callback is not None
        app = make_app("")
        app.command(self.name)(self.callback())
        return typer.main.get_command(app).make_context(*arguments, **extra)


def add_command(app: typer.Typer, module: str, summary: str) -> None:
    """Add the function of a module that has the module's own name."""
    name = module.rpartition(".")[2]

    def load() -> Callable[..., None]:
        command: Callable[..., None] = getattr(import_module(module), name)
        return command

    app.command(name, help=summary, cls=LazyCommand)(load)
