"""The fragments of several builds of one model as one report, and its JSON form."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from graphs.contract.json_records import write_json
from graphs.contract.spec import PRECISIONS, BuildError, Precision
from graphs.parity.findings import (
    SOURCES,
    FindingsSource,
    FP8Stats,
    Fragment,
    Hint,
    RangeWarning,
    RoutingRecord,
    TapComparison,
    Tie,
    first_bad,
    passed,
)

REPORT_FORMAT = 2


@dataclass(frozen=True)
class BuildFindings:
    """One build's findings: those of its graphs alone, then those of blocks and chain."""

    precision: Precision
    fragments: tuple[Fragment, ...]

    @property
    def rows(self) -> list[TapComparison]:
        return [row for f in self.fragments for row in f.rows]

    def rows_of(self, source: FindingsSource) -> list[TapComparison]:
        return [row for f in self.fragments if f.source == source for row in f.rows]

    @property
    def routing(self) -> list[RoutingRecord]:
        return [routing for f in self.fragments for routing in f.routing]

    @property
    def ties(self) -> list[tuple[RoutingRecord, Tie]]:
        return [(routing, tie) for routing in self.routing for tie in routing.ties]

    @property
    def fp8(self) -> list[FP8Stats]:
        return [stats for f in self.fragments for stats in f.fp8]

    @property
    def ranges(self) -> list[RangeWarning]:
        return [warning for f in self.fragments for warning in f.ranges]

    @property
    def hints(self) -> list[Hint]:
        return [hint for f in self.fragments for hint in f.hints]

    @property
    def not_run(self) -> list[str]:
        return [reason for f in self.fragments for reason in f.not_run]

    @property
    def first_bad(self) -> TapComparison | None:
        return first_bad(self.rows)

    @property
    def passed(self) -> bool:
        return passed(self.rows, self.routing)

    @property
    def verdict(self) -> str:
        return verdict(self.passed)

    def as_dict(self) -> dict[str, Any]:
        """Every finding; a row and a routing also say which parity command they are from."""

        def listed(name: str) -> list[dict[str, Any]]:
            return [
                {"source": f.source, **dataclasses.asdict(item)}
                for f in self.fragments
                for item in getattr(f, name)
            ]

        bad = self.first_bad
        return {
            "precision": self.precision,
            "verdict": self.verdict,
            "first_bad": bad and dataclasses.asdict(bad),
            "hints": listed("hints"),
            "not_run": self.not_run,
            "ranges": listed("ranges"),
            "routing": listed("routing"),
            "fp8": listed("fp8"),
            "rows": listed("rows"),
        }


@dataclass(frozen=True)
class ParityReport:
    """One model's builds, in the order of the precisions."""

    model: str
    builds: tuple[BuildFindings, ...]

    @property
    def passed(self) -> bool:
        return all(build.passed for build in self.builds)

    @property
    def verdict(self) -> str:
        return verdict(self.passed)

    def save(self, folder: Path) -> Path:
        """Write report.json; returns its path."""
        path = folder / "report.json"
        folder.mkdir(parents=True, exist_ok=True)
        builds = [build.as_dict() for build in self.builds]
        head = {"format": REPORT_FORMAT, "model": self.model, "verdict": self.verdict}
        write_json(path, head | {"builds": builds})
        return path


def verdict(passed: bool) -> str:
    return "passed" if passed else "failed"


def merge(builds: Sequence[Path]) -> ParityReport:
    """Merge both fragments of every build.

    Raises BuildError where one is missing or does not belong, and where nothing was compared.
    """
    reports: dict[Precision, BuildFindings] = {}
    for build in builds:
        fragments = tuple(Fragment.load(build, source) for source in SOURCES)
        precision = fragments[0].precision
        if precision in reports:
            raise BuildError(f"{build}: expected one build per precision, got two of {precision}")
        reports[precision] = BuildFindings(precision, fragments)
        if not reports[precision].rows:
            raise BuildError(
                f"{build}: nothing was compared, so there is no verdict; make goldens with `python "
                "-m export golden` and run both parity commands again"
            )
    every = [f for report in reports.values() for f in report.fragments]
    for name in ("model", "config_sha256"):
        if len(values := sorted({getattr(f, name) for f in every})) > 1:
            raise BuildError(
                f"{name}: expected builds of one model, got {' and '.join(values)}; report each "
                "model on its own"
            )
    ordered = [reports[precision] for precision in PRECISIONS if precision in reports]
    return ParityReport(every[0].model, tuple(ordered))
