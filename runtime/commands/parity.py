"""`python -m runtime parity`."""

from contextlib import closing

import typer
from rich.table import Table

from graphs.cli import wide_console
from graphs.parity.findings import Fragment
from graphs.report.terminal import show
from runtime.commands.loading import load
from runtime.commands.options import BuildArgument, OpeningOptions, RoundedOption, with_groups
from runtime.parity import runtime_parity


@with_groups
def parity(build: BuildArgument, opening: OpeningOptions, rounded: RoundedOption = False) -> None:
    """Compare blocks and the whole chain with the build's goldens; exit status 1 past tolerance.

    The findings go to BUILD/parity/chain.json; `python -m graphs report` makes a page of them. With
    --rounded, the distance from the reference is printed, and nothing else: the reference rounds
    nothing to bf16, so no tolerance holds.
    """
    chain = load(build, opening.load_options(rounded=rounded or None))
    with closing(chain.backend):
        fragment = runtime_parity(chain, build)
    if rounded:
        wide_console().print(_distances(fragment))
        return
    fragment.save(build)
    if not show(wide_console(), fragment):
        raise typer.Exit(1)


def _distances(fragment: Fragment) -> Table:
    """The outputs of blocks and chain, each computed from the golden's inputs without help."""
    table = Table(title=f"{fragment.precision}, rounded as an engine: distance from the reference")
    for column in ("case", "layer", "output"):
        table.add_column(column)
    for column in ("relative RMS", "largest error"):
        table.add_column(column, justify="right")
    table.add_column("")
    for row in fragment.rows:
        if row.kind == "output" and not row.fed:
            layer = "" if row.layer is None else str(row.layer)
            errors = f"{row.rms_error:.1e}", f"{row.max_error:.1e}"
            table.add_row(row.case, layer, row.tap, *errors, row.remark)
    return table
