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
from typing import Any, Literal

REPORT_FORMAT = 1

# wall: until it was done. On a GPU also stream: between two CUDA events, one before and one behind
# all that the stream was given; and launch: until the host had given it.
Clock = Literal["wall", "stream", "launch"]


class BenchReportError(ValueError):
    """A file that is no report, or of another format."""


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
    clock: Clock = "wall"

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
class BenchReport:
    """`machine` and `versions` say where and with what; the rest is what was measured."""

    machine: dict[str, Any]
    versions: dict[str, str]
    measurements: list[Measurement] = field(default_factory=list)
    computed: dict[str, Any] = field(default_factory=dict)  # from figures, not from a clock

    def find(self, what: str, by: str, clock: Clock = "wall", **case: int) -> Measurement:
        """Raises KeyError."""
        for found in self.measurements:
            if (found.what, found.by, found.clock, found.case) == (what, by, clock, case):
                return found
        raise KeyError(f"no measurement of {what} by {by} with {case}, clock {clock}")

    @classmethod
    def load(cls, path: Path) -> "BenchReport":
        """Raises ReportError."""
        try:
            raw = json.loads(path.read_text(encoding="utf-8"))
            if raw["format"] != REPORT_FORMAT:
                raise ValueError(f"format {REPORT_FORMAT} expected, found {raw['format']}")
            measurements = [_measurement(item) for item in raw["measurements"]]
            return cls(raw["machine"], raw["versions"], measurements, raw["computed"])
        except (OSError, KeyError, TypeError, ValueError) as e:
            raise BenchReportError(
                f"{path}: a benchmark's report expected: {e!r}; measure again"
            ) from e

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


def _measurement(raw: dict[str, Any]) -> Measurement:
    own = {f.name: raw[f.name] for f in dataclasses.fields(Measurement)}
    return Measurement(**own | {"seconds": tuple(own["seconds"])})


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
    return {name: tuple(found) for name, found in seconds.items()}
