"""A report on a terminal: a line for each thing and case, with a column for each clock."""

from collections.abc import Iterator
from typing import Any

from rich.table import Table

from runtime.benchmark.measurements import BenchReport, Clock, Measurement

CLOCKS: dict[Clock, str] = {"stream": "GPU", "wall": "wall", "launch": "launch"}
SIZES = ("batch", "tokens", "cached")


def table(report: BenchReport, title: str) -> Table:
    """Milliseconds: medians; quartiles and the ratio to the floor are the first clock's."""
    clocks = [clock for clock in CLOCKS if any(m.clock == clock for m in report.measurements)]
    first, *others = clocks
    marks = _marks(report)
    columns = [CLOCKS[first], "quartiles", *(CLOCKS[clock] for clock in others)]
    columns += ["floor", "× floor", "tokens/s", "at best"] if marks else ["tokens/s"]
    shown = Table(title=f"{title}; medians in ms")
    shown.add_column("")
    for column in ("seq. × tokens", "cached", *columns):
        shown.add_column(column, justify="right", no_wrap=True)
    rates = {tuple(rate[size] for size in SIZES): rate for rate in _rates(report)}
    for group in _groups(report):
        leading = group[first]
        row = {CLOCKS[clock]: number(m.median * 1e3) for clock, m in group.items()}
        low, high = (number(seconds * 1e3) for seconds in leading.middle_half)
        row |= {"quartiles": f"{low}–{high}"} | _floor(leading, marks)
        if leading.what == "chain":
            row |= _rate(rates[tuple(leading.case.values())])
        cells = (row.get(column, "") for column in columns)
        shown.add_row(leading.what, *_case(leading.case), *cells)
    return shown


def notes(report: BenchReport) -> Iterator[str]:
    """What the floors stand for, and the cases left out."""
    marks = _marks(report)
    for floor, mark in marks.items():
        yield f"floor{mark}: {floor}"
    if not marks:
        yield "no floor: what this device could do at best is not known"
    for case in report.computed["left_out"]:
        yield f"left out: {case}"


def _marks(report: BenchReport) -> dict[str, str]:
    """For each distinct floor, as many stars as there are floors before it."""
    floors = dict.fromkeys(m.floor_of for m in report.measurements if m.floor_of)
    return {floor: "*" * count for count, floor in enumerate(floors)}


def _rates(report: BenchReport) -> list[dict[str, Any]]:
    rates: list[dict[str, Any]] = report.computed["tokens_per_second"]
    return rates


def _groups(report: BenchReport) -> list[dict[Clock, Measurement]]:
    groups: dict[tuple[str, tuple[tuple[str, int], ...]], dict[Clock, Measurement]] = {}
    for m in report.measurements:
        groups.setdefault((m.what, tuple(m.case.items())), {})[m.clock] = m
    return list(groups.values())


def _case(sizes: dict[str, int]) -> tuple[str, str]:
    cached = sizes.get("cached")
    return f"{sizes['batch']} × {sizes.get('tokens', 1)}", "" if cached is None else f"{cached:,}"


def _floor(m: Measurement, marks: dict[str, str]) -> dict[str, str]:
    if m.floor_seconds is None or m.floor_of is None:
        return {}
    ratio = f"{number(m.median / m.floor_seconds)}{marks[m.floor_of]}"
    return {"floor": number(m.floor_seconds * 1e3), "× floor": ratio}


def _rate(rate: dict[str, Any]) -> dict[str, str]:
    shown = {"tokens/s": rate["median"], "at best": rate["at_best"]}
    return {column: number(value) for column, value in shown.items() if value is not None}


def number(value: float) -> str:
    """The value with three significant digits; from 100 up, as a whole number."""
    return f"{value:,.0f}" if value >= 100 else f"{value:#.3g}"
