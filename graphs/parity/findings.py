"""The findings of a parity run: the contract between the two parity commands and the report.

build/<model>/<precision>/parity/
    graphs.json     `python -m graphs parity`: each graph alone
    chain.json      `python -m runtime parity`: blocks with their experts, and the whole chain

Errors are over whole tensors: max|a−b| / max|b|, and the relative RMS ‖a−b‖ / ‖b‖, where b is the
reference's. One that is not finite is null in the file and NaN when read back.
"""

import dataclasses
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, get_args

from graphs.contract.json_records import write_json
from graphs.contract.spec import (
    GOLDEN_MODES,
    BuildError,
    BuildSpec,
    GoldenMode,
    Precision,
    load_record,
)

FRAGMENT_FORMAT = 2
FOLDER = "parity"  # in a build folder

FindingsSource = Literal["graphs", "chain"]
TapKind = Literal["input", "tap", "output"]
Metric = Literal["max", "rms"]
SOURCES: tuple[FindingsSource, ...] = get_args(FindingsSource)
COMMANDS: dict[FindingsSource, str] = {
    "graphs": "python -m graphs parity",
    "chain": "python -m runtime parity",
}


@dataclass(frozen=True)
class TapComparison:
    """One tensor of one case against the reference's."""

    case: str
    graph: str  # dense, moe, experts, head, chain
    layer: int | None
    mode: GoldenMode | None
    tap: str
    symbol: str  # what the papers call it: ĉ^Q
    order: int  # its place in the dataflow of its case
    kind: TapKind
    fed: bool  # FP8 linear layers were fed the reference's inputs
    max_error: float
    rms_error: float
    metric: Metric  # the one that the limit holds for
    limit: float
    passed: bool
    worst: list[int] = field(default_factory=list)  # index of the largest error
    positions: list[float] = field(default_factory=list)  # relative RMS of each token's row
    remark: str = ""

    @property
    def error(self) -> float:
        """The one that the limit holds for."""
        return self.max_error if self.metric == "max" else self.rms_error


@dataclass(frozen=True)
class Tie:
    """A token for which a graph chose other experts than the reference."""

    token: int
    expected: list[int]
    chosen: list[int]
    margin: float
    limit: float  # the largest margin that counts as a tie
    bound: float | None  # of the effect on the token's output, relative to its norm
    effect: float | None  # measured
    passed: bool


@dataclass(frozen=True)
class RoutingRecord:
    """One MoE case's routing: per token the reference's margin, and whether the sets agree.

    A margin is by how much the last chosen expert's score for choosing led the first not chosen.
    """

    case: str
    layer: int
    tokens: int
    margins: list[float]
    agree: list[bool]
    ties: list[Tie]


@dataclass(frozen=True)
class FP8Stats:
    """Scales and values of one tensor that is quantised to e4m3.

    log2_scale: (bin, count) pairs, a row's scale in bin floor(log2(scale)). at_peak: values with
    |q| = 448; flushed: values that were not zero and became zero. floor_rows: rows whose scale is
    the smallest there is.
    """

    case: str
    layer: int
    module: str
    kind: Literal["activation", "weight"]
    log2_scale: list[tuple[int, int]]
    values: int
    at_peak: int
    flushed: int
    rows: int
    floor_rows: int


@dataclass(frozen=True)
class RangeWarning:
    """A tap with values that a narrower type would lose."""

    case: str
    tap: str
    rule: str
    text: str


@dataclass(frozen=True)
class Hint:
    """The likely cause of a failure, with the numbers that speak for it."""

    case: str
    tap: str
    cause: str  # a short id: mscale2_missing
    text: str
    evidence: str


@dataclass(frozen=True)
class Fragment:
    """One parity command's findings in one build. not_run: what was not compared, and why."""

    model: str
    precision: Precision
    config_sha256: str
    source: FindingsSource
    rows: list[TapComparison]
    routing: list[RoutingRecord] = field(default_factory=list)
    fp8: list[FP8Stats] = field(default_factory=list)
    ranges: list[RangeWarning] = field(default_factory=list)
    hints: list[Hint] = field(default_factory=list)
    not_run: list[str] = field(default_factory=list)
    format: int = FRAGMENT_FORMAT

    @property
    def passed(self) -> bool:
        return passed(self.rows, self.routing)

    def save(self, build: Path) -> Path:
        """Write the build's fragment of this source, replacing an older one; returns its path."""
        path = fragment_path(build, self.source)
        path.parent.mkdir(exist_ok=True)
        write_json(path, dataclasses.asdict(self))
        return path

    @classmethod
    def load(cls, build: Path, source: FindingsSource) -> "Fragment":
        """Read a build's fragment and hold it against its spec. Raises BuildError."""
        path, spec = fragment_path(build, source), BuildSpec.load(build)
        again = f"run `{COMMANDS[source]} {build}`"
        fragment = load_record(cls, path, FRAGMENT_FORMAT, again)
        for name, expected in (
            ("source", source),
            ("precision", spec.precision),
            ("config_sha256", spec.config_sha256),
        ):
            if (value := getattr(fragment, name)) != expected:
                raise BuildError(
                    f"{path}: {name}: expected {expected} as in the build, got {value}; {again}"
                )
        return fragment


def fragment_path(build: Path, source: FindingsSource) -> Path:
    return build / FOLDER / f"{source}.json"


def passed(rows: Iterable[TapComparison], routing: Iterable[RoutingRecord]) -> bool:
    """Whether every tensor is within its limit, and every difference of routing a tie."""
    return all(r.passed for r in rows) and all(t.passed for r in routing for t in r.ties)


def first_bad(rows: Iterable[TapComparison]) -> TapComparison | None:
    """The failed one that comes first in the model: by layer, mode and place in the dataflow.

    A tensor of no layer, or of no mode, comes last.
    """

    def place(row: TapComparison) -> tuple[float, int, int]:
        layer = math.inf if row.layer is None else row.layer
        mode = len(GOLDEN_MODES) if row.mode is None else GOLDEN_MODES.index(row.mode)
        return layer, mode, row.order

    return min((row for row in rows if not row.passed), key=place, default=None)


def distinct(hints: Iterable[Hint]) -> list[Hint]:
    """One hint per cause and text: that of the first case that shows it."""
    first: dict[tuple[str, str], Hint] = {}
    for hint in hints:
        first.setdefault((hint.cause, hint.text), hint)
    return list(first.values())
