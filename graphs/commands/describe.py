"""`python -m graphs describe`: the parameters and bytes of a model's parts, from its config."""

import json
from collections.abc import Callable
from typing import Annotated

import typer
from rich.table import Table

from graphs.budget.accounting import Account, Figures
from graphs.cli import wide_console
from graphs.contract.config import load_config


def describe(
    source: Annotated[
        str,
        typer.Argument(help="A preset (k2), a config.json, or a checkpoint's folder."),
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Print every figure as JSON.")] = False,
) -> None:
    """Show parameters and bytes of each part of a model, and the cache's values."""
    account = Account.from_config(load_config(source))
    if as_json:
        print(json.dumps(account.as_dict(), indent=1, ensure_ascii=False))
        return
    console = wide_console()
    console.print(_parameter_table(account))
    values = account.cache_values
    console.print(f"active per token, with lm_head: {account.active_parameters_per_token:,}")
    for kind in account.blocks:
        console.print(f"active per token, {kind} block: {account.active_parameters(kind):,}")
    console.print(
        f"cache, values a position and layer: {values['latent']:,} as latent, "
        f"{values['per_head']:,} as per-head keys and values"
    )


def _parameter_table(account: Account) -> Table:
    table = Table(title=f"{account.config.num_hidden_layers} layers")
    table.add_column("")
    columns: dict[str, Callable[[Figures], int | None]] = {
        "parameters": lambda f: f.parameters,
        "bf16 checkpoint, B": lambda f: f.bf16_checkpoint_bytes,
        "FP8 checkpoint, B": lambda f: f.fp8_checkpoint_bytes,
        "INT4 checkpoint, B": lambda f: f.int4_checkpoint_bytes,
        "fp8 packed, B": lambda f: f.packed_bytes["fp8"],
    }
    columns = {name: size for name, size in columns.items() if size(account.model) is not None}
    for column in columns:
        table.add_column(column, justify="right")

    def row(name: str, figures: Figures, style: str | None = None, section: bool = False) -> None:
        cells = (f"{size(figures):,}" for size in columns.values())
        table.add_row(name, *cells, style=style, end_section=section)

    for kind, components in account.blocks.items():
        attention = [c for c in components if c.attention]
        for component in attention:
            row(f"    {component.name}", account.figures([component]))
        row("  attention", account.figures(attention))
        for component in components[len(attention) :]:
            row(f"  {component.name}", account.figures([component]))
        count = account.config.count(kind)
        row(f"{kind} block", account.figures(components), "bold")
        row(f"{kind} blocks, {count} in all", account.figures(components * count))
        row(
            "  of it output projection",
            account.figures(attention[-1:] * count),
            section=True,
        )
    for component in account.ends:
        row(component.name, account.figures([component]))
    row("model", account.model, "bold")
    return table
