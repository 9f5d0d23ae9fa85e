"""What a benchmark found, in the one JSON form that `make bench` and `runtime bench` write.

Things to compare run in turns, so that what else the machine does falls on all of them alike; what
counts is the median, and how far the middle half of the runs lies apart.
"""

import dataclasses
import json
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

REPORT_FORMAT = 1


@dataclass(frozen=True)
class Measurement:
    """Runs of one thing: `what` was done, in which `case` (sizes), `by` whom.

    `floor_seconds` is what the bytes or operations that it cannot do without would take, if that
    is known; `floor_of` says of what.
    """

    what: str
    by: str
    case: dict[str, int]
    seconds: tuple[float, ...]
    floor_seconds: float | None = None
    floor_of: str | None = None

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def middle_half(self) -> tuple[float, float]:
        """The quartiles; of a single run, twice itself."""
        if len(self.seconds) == 1:
            return self.seconds[0], self.seconds[0]
        low, _, high = statistics.quantiles(self.seconds, n=4, method="inclusive")
        return low, high

    def as_dict(self) -> dict[str, Any]:
        derived = {"median": self.median, "middle_half": self.middle_half}
        return dataclasses.asdict(self) | derived


@dataclass
class Report:
    """`machine` and `versions` say where and with what; the rest is what was measured."""

    machine: dict[str, Any]
    versions: dict[str, str]
    measurements: list[Measurement] = field(default_factory=list)
    computed: dict[str, Any] = field(default_factory=dict)  # from figures, not from a clock

    def find(self, what: str, by: str, **case: int) -> Measurement:
        """Raises KeyError."""
        for found in self.measurements:
            if (found.what, found.by, found.case) == (what, by, case):
                return found
        raise KeyError(f"no measurement of {what} by {by} with {case}")

    def save(self, path: Path) -> None:
        content = {
            "format": REPORT_FORMAT,
            "machine": self.machine,
            "versions": self.versions,
            "measurements": [found.as_dict() for found in self.measurements],
            "computed": self.computed,
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(path.name + ".tmp")
        temporary.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        temporary.replace(path)


def in_turns(
    runs: Mapping[str, Callable[[], object]], rounds: int, warm_up: int = 1
) -> dict[str, tuple[float, ...]]:
    """Seconds of each run in every round, A B A B …, after rounds that do not count."""
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(warm_up + rounds):
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            if turn >= warm_up:
                seconds[name].append(time.perf_counter() - start)
    return {name: tuple(found) for name, found in seconds.items()}
