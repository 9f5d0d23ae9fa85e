"""A benchmark's measurements, in the JSON that `make bench` and `runtime bench` write.

Things to compare run in turns, so that other load on the machine falls on all of them alike. The
median counts, and how far the middle half of the runs lies apart.
"""

import dataclasses
import itertools
import json
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from graphs.contract.files import write_text
from graphs.contract.json_records import decode

REPORT_FORMAT = 1
DERIVED = ("median", "middle_half")  # in the file for readers; not read back

# wall: until the work was done. On a GPU also stream: between two CUDA events, before and behind
# the work; and launch: until the host had queued it.
Clock = Literal["wall", "stream", "launch"]


class BenchReportError(ValueError):
    """A file that is no benchmark report, or has another format."""


@dataclass(frozen=True)
class Measurement:
    """Runs of one thing: `what` was done, in which `case` (sizes), `by` which implementation.

    `floor_seconds` is the time for the bytes or operations that no implementation can avoid, if
    known; `floor_of` describes it.
    """

    what: str
    by: str
    case: dict[str, int]
    seconds: tuple[float, ...]
    floor_seconds: float | None = None
    floor_of: str | None = None
    clock: Clock = "wall"

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def middle_half(self) -> tuple[float, float]:
        """The quartiles; for a single run, its seconds twice."""
        if len(self.seconds) == 1:
            return self.seconds[0], self.seconds[0]
        low, _, high = statistics.quantiles(self.seconds, n=4, method="inclusive")
        return low, high

    def as_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self) | {name: getattr(self, name) for name in DERIVED}


@dataclass
class BenchReport:
    """Measurements of one machine and of these package versions."""

    machine: dict[str, Any]
    versions: dict[str, str]
    measurements: list[Measurement] = field(default_factory=list)
    computed: dict[str, Any] = field(default_factory=dict)  # figures that no clock gave

    def find(self, what: str, by: str, clock: Clock = "wall", **case: int) -> Measurement:
        """Raises KeyError."""
        for m in self.measurements:
            if (m.what, m.by, m.clock, m.case) == (what, by, clock, case):
                return m
        raise KeyError(f"no measurement of {what} by {by} with {case}, clock {clock}")

    @classmethod
    def load(cls, path: Path) -> "BenchReport":
        """Raises BenchReportError."""
        try:
            raw = json.loads(path.read_text(encoding="utf-8"))
            if (version := raw.pop("format")) != REPORT_FORMAT:
                raise ValueError(f"expected format {REPORT_FORMAT}, got {version}")
            for name, item in itertools.product(DERIVED, raw["measurements"]):
                item.pop(name, None)
            report: BenchReport = decode(cls, raw)
        except (OSError, KeyError, TypeError, ValueError, AttributeError) as e:
            raise BenchReportError(
                f"{path}: expected a benchmark's report: {e!r}; measure again"
            ) from e
        return report

    def save(self, path: Path) -> None:
        content = {
            "format": REPORT_FORMAT,
            "machine": self.machine,
            "versions": self.versions,
            "measurements": [m.as_dict() for m in self.measurements],
            "computed": self.computed,
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, json.dumps(content, indent=1) + "\n")


def in_turns(
    runs: Mapping[str, Callable[[], object]], rounds: int, warm_up: int = 1, pause: float = 0.0
) -> dict[str, tuple[float, ...]]:
    """Seconds of each run in every round, A B A B …, after rounds that do not count.

    `pause` seconds before each let the threads of the one before it go to sleep.
    """
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(warm_up + rounds):
        for name, run in runs.items():
            time.sleep(pause)
            start = time.perf_counter()
            run()
            if turn >= warm_up:
                seconds[name].append(time.perf_counter() - start)
    return {name: tuple(samples) for name, samples in seconds.items()}
