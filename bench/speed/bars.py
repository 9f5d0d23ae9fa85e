"""Bars for speed: ratios of runs in turns, and their bounds.

A ratio is the median over the rounds, each of two neighbouring runs, so other load on the machine
falls on both. transformers is the faster of its two forms of attention, by their medians.
"""

import statistics
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from bench.speed.dense_block import OURS, TRANSFORMERS, kind_of
from runtime.benchmark.cases import BenchCase
from runtime.benchmark.measurements import BenchReport, Measurement

TIMES_TRANSFORMERS = {
    BenchCase(1, 1, 1000): 4.0,
    BenchCase(1, 1, 4096): 10.0,
    BenchCase(1, 1, 32768): 30.0,
    BenchCase(8, 1, 1000): 6.0,
    BenchCase(1, 128, 0): 1.2,
}
TIMES_FLOOR = {BenchCase(1, 1, 1000): 1.35}
LIMITS = {"read": "B", "multiply": "FLOP"}  # the run, and the unit that it counts
GROWTH = 1.1  # of a step's time, where only the cache's memory grows


@dataclass(frozen=True)
class SpeedBar:
    """A ratio and its bound: the least, or with `most` the most that it may be."""

    what: str
    ratio: float
    bound: float
    most: bool = False

    @property
    def met(self) -> bool:
        return self.ratio <= self.bound if self.most else self.ratio >= self.bound

    @classmethod
    def from_dict(cls, raw: dict[str, Any]) -> "SpeedBar":
        """The bar that `as_dict` wrote."""
        return cls(raw["what"], raw["ratio"], raw["bound"], raw["most"])

    def __str__(self) -> str:
        limit = f"at {'most' if self.most else 'least'} {self.bound:g}"
        return f"{self.what}: {self.ratio:.2f}, {limit}: {'met' if self.met else 'MISSED'}"

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {"met": self.met}


def judge(report: BenchReport) -> Iterator[SpeedBar]:
    """Every bar whose runs the report has."""
    for case, bound in TIMES_TRANSFORMERS.items():
        if ours := step_of(report, OURS, case):
            ratio = ratio_of(faster(report, case), ours)
            yield SpeedBar(f"transformers' time over ours, {case}", ratio, bound)
    for case, bound in TIMES_FLOOR.items():
        if ours := step_of(report, OURS, case):
            ratio = times_floor(report, ours)
            yield SpeedBar(f"our time over the floor, {case}", ratio, bound, most=True)
    if steps := growth_of(report):
        small, large = steps
        sizes = (f"{m.case['cache_rows']:,}" for m in (large, small))
        what = f"a step on {small.case['cached']} rows, a cache of {' over one of '.join(sizes)}"
        yield SpeedBar(what, ratio_of(large, small), GROWTH, most=True)


def step_of(report: BenchReport, by: str, case: BenchCase) -> Measurement | None:
    """A step of the block; None where the report has none."""
    return measured(report, kind_of(case), by, case.sizes)


def measured(report: BenchReport, what: str, by: str, case: dict[str, int]) -> Measurement | None:
    try:
        return report.find(what, by, "wall", **case)
    except KeyError:
        return None


def faster(report: BenchReport, case: BenchCase) -> Measurement:
    """The faster of transformers' two forms. Raises KeyError."""
    steps = [m for by in TRANSFORMERS if (m := step_of(report, by, case))]
    if not steps:
        raise KeyError(f"no measurement of transformers, {case}")
    return min(steps, key=lambda m: m.median)


def growth_of(report: BenchReport) -> tuple[Measurement, Measurement] | None:
    """Steps in the smallest cache and in the largest; None where there are none."""
    steps = [m for m in report.measurements if m.what == "step"]
    steps.sort(key=lambda m: m.case["cache_rows"])
    return (steps[0], steps[-1]) if steps else None


def ratio_of(a: Measurement, b: Measurement) -> float:
    return statistics.median(x / y for x, y in zip(a.seconds, b.seconds, strict=True))


def times_floor(report: BenchReport, step: Measurement) -> float:
    """A step's time over its floor, at the machine's limit in the same rounds."""
    assert step.floor_seconds is not None
    limit = next(
        m for m in report.measurements if m.what in LIMITS and m.case.items() >= step.case.items()
    )
    return ratio_of(step, limit) * limit.median / step.floor_seconds


def rates(report: BenchReport, what: str) -> list[float]:
    """Bytes or operations a second of every such run in the report."""
    runs = [m for m in report.measurements if m.what == what]
    return [m.case[LIMITS[what]] / seconds for m in runs for seconds in m.seconds]
