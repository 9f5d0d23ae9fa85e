"""A report's figures in tables, for a terminal and for Markdown."""

import statistics
from collections.abc import Iterator
from dataclasses import dataclass

from rich.table import Table

from bench.speed.bars import SpeedBar, faster, measured, rates, ratio_of, step_of, times_floor
from bench.speed.dense_block import INVARIANT, OURS, TRANSFORMERS
from runtime.benchmark.cases import BenchCase
from runtime.benchmark.measurements import BenchReport, Measurement

HEADINGS = {OURS: OURS, INVARIANT: "batch-invariant"} | {by: by.split()[-1] for by in TRANSFORMERS}


@dataclass(frozen=True)
class Sheet:
    """A table; its first column has names."""

    columns: tuple[str, ...]
    lines: list[list[str]]

    @property
    def rich(self) -> Table:
        table = Table()
        table.add_column(self.columns[0])
        for column in self.columns[1:]:
            table.add_column(column, justify="right")
        for line in self.lines:
            table.add_row(*line)
        return table

    @property
    def markdown(self) -> str:
        rule = ["---", *("---:" for _ in self.columns[1:])]
        return "\n".join(f"| {' | '.join(line)} |" for line in (self.columns, rule, *self.lines))


def sheets(report: BenchReport) -> list[Sheet]:
    """Tables of the block and of the whole small model."""
    return [
        Sheet(("the block, ms", *HEADINGS.values(), "× faster", "× floor"), list(_steps(report))),
        Sheet(("the whole model, tokens/s", *HEADINGS.values(), "× faster"), list(_rates(report))),
    ]


def notes(report: BenchReport) -> Iterator[str]:
    """The machine's limits, agreement with transformers, and the bars."""
    for what, unit in ("read", "GB/s of memory read"), ("multiply", "GFLOP/s multiplied"):
        low, middle, high = statistics.quantiles(rates(report, what), n=4)
        spread = f"{middle / 1e9:,.1f} ({low / 1e9:,.1f}–{high / 1e9:,.1f})"
        yield f"the machine, in turns with the block: {spread} {unit}"
    errors, same = report.computed["max_error"], report.computed["tokens_equal"]
    yield f"the block's output against transformers': max|a−b|/max|b| ≤ {max(errors.values()):.1e}"
    yield f"tokens that equal transformers': {min(same.values()):.2%}"
    for bar in report.computed["bars"]:
        yield str(SpeedBar.from_dict(bar))


def _steps(report: BenchReport) -> Iterator[list[str]]:
    for case, ours in steps_of(report, OURS):
        steps = [step_of(report, by, case) for by in HEADINGS]
        floor = f"{times_floor(report, ours):.2f}"
        cells = [_milliseconds(m) if m else "" for m in steps]
        yield [_name(case), *cells, f"{ratio_of(faster(report, case), ours):.1f}", floor]


def steps_of(report: BenchReport, by: str) -> Iterator[tuple[BenchCase, Measurement]]:
    """All steps of the block by one implementation."""
    for m in report.measurements:
        if m.what in ("decode", "prefill") and m.by == by:
            yield BenchCase(**m.case), m


def _rates(report: BenchReport) -> Iterator[list[str]]:
    for ours in report.measurements:
        if (ours.what, ours.by) == ("generate", OURS):
            runs = [m for by in HEADINGS if (m := measured(report, "generate", by, ours.case))]
            best = min((m for m in runs if m.by in TRANSFORMERS), key=lambda m: m.median)
            cells = [f"{tokens_per_second(m):,.0f}" for m in runs]
            batch, new = ours.case["batch"], ours.case["new_tokens"]
            what = f"{batch} prompt{'s' if batch > 1 else ''}, {new} new tokens"
            yield [what, *cells, f"{ratio_of(best, ours):.1f}"]


def tokens_per_second(m: Measurement) -> float:
    return m.case["batch"] * m.case["new_tokens"] / m.median


def _milliseconds(m: Measurement) -> str:
    digits = 0 if m.median >= 0.1 else 1
    median, low, high = (f"{seconds * 1e3:,.{digits}f}" for seconds in (m.median, *m.middle_half))
    return f"{median} ({low}–{high})"


def _name(case: BenchCase) -> str:
    if case.tokens > 1:
        return f"prefill, {case.tokens}"
    return f"decode, {case.batch} × {case.cached:,} cached"
