"""`python -m runtime parity`."""

from contextlib import closing

import typer

from graphs.cli import wide_console
from graphs.report.terminal import show
from runtime.commands.loading import load
from runtime.commands.options import BuildArgument, OpeningOptions, with_groups
from runtime.parity import runtime_parity


@with_groups
def parity(build: BuildArgument, opening: OpeningOptions) -> None:
    """Compare blocks and the whole chain with the build's goldens; exit status 1 past tolerance.

    The findings go to BUILD/parity/chain.json; `python -m graphs report` makes a page of them.
    """
    chain = load(build, opening.load_options())
    with closing(chain.backend):
        fragment = runtime_parity(chain, build)
    fragment.save(build)
    if not show(wide_console(), fragment):
        raise typer.Exit(1)
