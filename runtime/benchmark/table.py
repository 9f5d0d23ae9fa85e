"""A report on a terminal: a line for each thing and case, all its clocks beside one another."""

from collections.abc import Iterator
from typing import Any

from rich.table import Table

from runtime.benchmark.measurements import BenchReport, Clock, Measurement

CLOCKS: dict[Clock, str] = {"stream": "GPU", "wall": "wall", "launch": "launch"}
SIZES = ("batch", "tokens", "cached")


def table(report: BenchReport, title: str) -> Table:
    """Milliseconds: medians, and the quartiles of the first clock, of which the ratio is, too."""
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
        row = {CLOCKS[clock]: number(found.median * 1e3) for clock, found in group.items()}
        low, high = (number(seconds * 1e3) for seconds in leading.middle_half)
        row |= {"quartiles": f"{low}–{high}"} | _floor(leading, marks)
        if leading.what == "chain":
            row |= _rate(rates[tuple(leading.case.values())])
        cells = (row.get(column, "") for column in columns)
        shown.add_row(leading.what, *_case(leading.case), *cells)
    return shown


def notes(report: BenchReport) -> Iterator[str]:
    """What floors are of, and what was not measured."""
    marks = _marks(report)
    for floor, mark in marks.items():
        yield f"floor{mark}: {floor}"
    if not marks:
        yield "no floor: what this device could do at best is not known"
    for case in report.computed["left_out"]:
        yield f"left out: {case}"


def _marks(report: BenchReport) -> dict[str, str]:
    """Of each floor that there is, as many stars as there are others before it."""
    floors = dict.fromkeys(m.floor_of for m in report.measurements if m.floor_of)
    return {floor: "*" * count for count, floor in enumerate(floors)}


def _rates(report: BenchReport) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = report.computed["tokens_per_second"]
    return found


def _groups(report: BenchReport) -> list[dict[Clock, Measurement]]:
    groups: dict[tuple[str, tuple[tuple[str, int], ...]], dict[Clock, Measurement]] = {}
    for found in report.measurements:
        groups.setdefault((found.what, tuple(found.case.items())), {})[found.clock] = found
    return list(groups.values())


def _case(sizes: dict[str, int]) -> tuple[str, str]:
    cached = sizes.get("cached")
    return f"{sizes['batch']} × {sizes.get('tokens', 1)}", "" if cached is None else f"{cached:,}"


def _floor(found: Measurement, marks: dict[str, str]) -> dict[str, str]:
    if found.floor_seconds is None or found.floor_of is None:
        return {}
    ratio = f"{number(found.median / found.floor_seconds)}{marks[found.floor_of]}"
    return {"floor": number(found.floor_seconds * 1e3), "× floor": ratio}


def _rate(rate: dict[str, Any]) -> dict[str, str]:
    shown = {"tokens/s": rate["median"], "at best": rate["at_best"]}
    return {column: number(value) for column, value in shown.items() if value is not None}


def number(value: float) -> str:
    """With three digits that count, or all of a whole number's."""
    return f"{value:,.0f}" if value >= 100 else f"{value:#.3g}"
