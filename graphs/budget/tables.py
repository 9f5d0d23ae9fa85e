"""Budgets for people: tables of memory and cards, of steps, of sequences, and of built engines."""

from collections.abc import Iterable, Sequence

from rich.box import SIMPLE
from rich.table import Table

from graphs.budget.engines import Built
from graphs.budget.gpus import Gpu
from graphs.budget.memory import cards_of_whole_layers, cards_split_evenly
from graphs.budget.model import MODEL, ModelBudget, tokens_per_second
from graphs.budget.traffic import Traffic, compute_seconds, memory_seconds, roofline_seconds


def memory_table(budgets: Sequence[ModelBudget], gpus: Sequence[Gpu]) -> Table:
    """Cards are those that take whole layers; in brackets as many as hold the bytes at all."""
    p, precision = budgets[0].profile, budgets[0].precision
    table = _table(
        f"{precision}, cache for {p.batch} × {p.context:,} rows: cards that hold whole layers "
        "(the bytes, were layers split)",
        ("\n\nmodel",),
        ("\nweights,\nGB", "\ncache,\nGB", "\nscratch,\nGB"),
        (f"{_head(gpu)}\n{gpu.memory / 1e9:.0f} GB" for gpu in gpus),
    )
    for budget in budgets:
        m = budget.memory
        sizes = (m.weights, m.cache_of_all_layers, m.scratch)
        table.add_row(
            budget.source,
            *(f"{size / 1e9:,.{1 if size >= 1e9 else 3}f}" for size in sizes),
            *(_cards(budget, gpu) for gpu in gpus),
        )
    return table


def _cards(budget: ModelBudget, gpu: Gpu) -> str:
    whole = cards_of_whole_layers(budget.memory, gpu)
    split = cards_split_evenly(budget.memory, gpu)
    if whole is None or whole != split:
        return f"{'–' if whole is None else whole} ({'–' if split is None else split})"
    return "one" if whole == 1 else str(whole)


def step_table(budget: ModelBudget, gpus: Sequence[Gpu]) -> Table:
    """A full step of each graph on one layer, and of the model."""
    p = budget.profile
    table = _table(
        f"{budget.source}, {budget.precision}: a step on {p.context:,} cached rows, decode "
        f"{p.batch} × 1 token, prefill 1 × {p.tokens}; µs at least (c: bound by operations)",
        ("\ngraph", "\nmode"),
        ("MB\nmoved", "of it\ncache", "\nGflop", "scratch,\nMB"),
        map(_head, gpus),
    )
    for step in budget.steps:
        read = step.traffic
        table.add_row(
            step.what,
            step.mode,
            _short(read.bytes / 1e6),
            _short(read.cache / 1e6),
            _short(sum(read.flops.values()) / 1e9),
            _short(step.scratch / 1e6),
            *(_microseconds(read, gpu) for gpu in gpus),
            style="bold" if step.what == MODEL else None,
            end_section=step.what == MODEL,
        )
    return table


def _microseconds(traffic: Traffic, gpu: Gpu) -> str:
    bound = "c" if compute_seconds(traffic, gpu) > memory_seconds(traffic, gpu) else ""
    us = roofline_seconds(traffic, gpu) * 1e6
    return f"{us:,.{0 if us >= 10 else 1}f}{bound}"


def sequence_table(budget: ModelBudget, gpus: Sequence[Gpu]) -> Table:
    """Tokens a second of 1 to 128 sequences."""
    table = _table(
        f"{budget.source}, {budget.precision}: tokens/s at most of all sequences in one step, each "
        f"on {budget.profile.context:,} cached rows, one step at a time",
        (),
        ("\nsequences", "cache,\nGB", "GB\nmoved"),
        map(_head, gpus),
    )
    for sequences in budget.sequences:
        table.add_row(
            str(sequences.count),
            _short(sequences.cache / 1e9),
            _short(sequences.traffic.bytes / 1e9),
            *(f"{tokens_per_second(sequences, gpu):,.0f}" for gpu in gpus),
        )
    return table


def built_table(figures: Iterable[Built]) -> Table:
    """The builder's figures beside those expected."""
    table = _table(
        "built engines: MB by the builder, and the most expected",
        ("model", "target", "graph", "of"),
        ("built", "expected", "share"),
    )
    for figure in figures:
        logged, share = figure.logged, figure.share
        table.add_row(
            figure.model,
            figure.target,
            figure.graph,
            figure.mode or "constants",
            "–" if logged is None else f"{logged / 1e6:,.2f}",
            f"{figure.expected / 1e6:,.2f}",
            "–" if share is None else f"{share:.0%}",
            style="red" if figure.too_much else None,
        )
    return table


def _table(
    title: str, names: Iterable[str], figures: Iterable[str], more: Iterable[str] = ()
) -> Table:
    """Empty, with columns of names, which are not cut, and of figures."""
    table = Table(
        title=title,
        title_justify="left",
        box=SIMPLE,
        padding=(0, 0, 0, 1),
        pad_edge=False,
        show_edge=False,
    )
    for column in names:
        table.add_column(column, no_wrap=True)
    for column in (*figures, *more):
        table.add_column(column, justify="right", no_wrap=True)
    return table


def _head(gpu: Gpu) -> str:
    """The GPU's label in two lines."""
    return "\n".join(gpu.label.rsplit(" ", 1)) if " " in gpu.label else f"\n{gpu.label}"


def _short(value: float) -> str:
    digits = 0 if value >= 1000 or value == 0 else 1 if value >= 1 else 3
    return f"{value:,.{digits}f}"
