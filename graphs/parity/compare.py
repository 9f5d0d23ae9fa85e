"""The comparison of two tensors and its limits, the same in every parity report."""

from dataclasses import dataclass

import numpy as np

from graphs.contract.spec import (
    GOLDEN_MODES,
    GRAPHS,
    GoldenMode,
    GraphSpec,
    Precision,
    TapSpec,
)
from graphs.contract.tensorfile import Array, TensorFile
from graphs.ops import MASKED
from graphs.parity.findings import Metric, TapComparison, TapKind
from graphs.parity.taps import by_token

# Largest accepted max|a−b|/max|b| (fp32) or relative RMS (others).
FP32_OUTPUT, FP32_ROWS = 1e-5, 5e-6
RMS: dict[Precision, float] = {"fp8": 2e-3, "bf16": 5e-3}
# The limit for what runs freely at fp8, a block or the whole chain: where an activation lies on the
# border of two e4m3 values, the order of a sum decides, and each such flip makes others further on.
FP8_FREE = 2e-2

# Two experts whose biased scores are closer than this may change places: rounding decides.
TIE_MARGIN: dict[Precision, float] = {"fp32": 1e-5, "bf16": 2e-2, "fp8": 2e-3}


@dataclass(frozen=True)
class ErrorLimit:
    """The largest error accepted, and which error it holds for."""

    metric: Metric
    value: float
    remark: str = ""


def limit_for(precision: Precision, tensor: str, free: bool = False) -> ErrorLimit:
    """The limit for a tensor; `free`: an fp8 graph ran on its own activations all along."""
    if precision == "fp32":
        return ErrorLimit("max", FP32_ROWS if tensor in ("new", "rows") else FP32_OUTPUT)
    if precision == "fp8" and free:
        return ErrorLimit("rms", FP8_FREE, "free-running")
    return ErrorLimit("rms", RMS[precision])


@dataclass(frozen=True)
class ReplayCase:
    """One golden and how it is replayed. fed: FP8 linear layers read the reference's inputs."""

    name: str
    graph: str
    layer: int | None
    mode: GoldenMode | None
    fed: bool = False

    @classmethod
    def from_golden(cls, golden: TensorFile, fed: bool = False) -> "ReplayCase":
        m = golden.metadata
        layer = int(m["layer"]) if "layer" in m else None
        mode = next((known for known in GOLDEN_MODES if known == m.get("mode")), None)
        return cls(golden.path.stem, m["graph"], layer, mode, fed)


@dataclass(frozen=True)
class ComparedTensor:
    """The tensor of a case that is compared."""

    case: ReplayCase
    tap: str
    symbol: str
    order: int
    kind: TapKind

    @classmethod
    def from_tap(cls, case: ReplayCase, graph: GraphSpec, tap: TapSpec) -> "ComparedTensor":
        """Taps of the graphs are ordered as the graphs are run."""
        outputs = {t.name for t in graph.outputs}
        order = 1000 * (1 + GRAPHS.index(graph.name)) + graph.taps.index(tap)
        kind: TapKind = "output" if tap.name in outputs else "tap"
        return cls(case, tap.name, tap.symbol, order, kind)

    def judged(
        self,
        limit: ErrorLimit,
        max_error: float,
        rms_error: float,
        passed: bool,
        worst: list[int] | None = None,
        positions: list[float] | None = None,
        remark: str = "",
    ) -> TapComparison:
        return TapComparison(
            case=self.case.name,
            graph=self.case.graph,
            layer=self.case.layer,
            mode=self.case.mode,
            tap=self.tap,
            symbol=self.symbol,
            order=self.order,
            kind=self.kind,
            fed=self.case.fed,
            max_error=max_error,
            rms_error=rms_error,
            metric=limit.metric,
            limit=limit.value,
            passed=passed,
            worst=worst or [],
            positions=positions or [],
            remark=", ".join(filter(None, (remark, limit.remark))),
        )


def compare(
    subject: ComparedTensor,
    actual: Array,
    expected: Array,
    limit: ErrorLimit,
    tap: TapSpec | None = None,
    remark: str = "",
) -> TapComparison:
    """Errors over the whole tensor, in float64; a value that is not finite fails.

    Both are in the reference's layout, of which `tap` tells the token axes. Masked scores are
    compared for being masked: a key that only one of both masks fails. Raises ValueError where the
    shapes differ.
    """
    a, b = actual.astype(np.float64), expected.astype(np.float64)
    if a.shape != b.shape:
        raise ValueError(
            f"{subject.case.name} {subject.tap}: expected shape {b.shape}, got {a.shape}"
        )
    masked_a, masked_b = a <= MASKED / 2, b <= MASKED / 2
    a, b = np.where(masked_a, 0.0, a), np.where(masked_b, 0.0, b)
    differing = int((masked_a != masked_b).sum())
    if differing:
        remark = ", ".join(filter(None, (remark, f"{differing} keys masked by one of both only")))
    difference = np.abs(a - b)
    max_error = float(difference.max(initial=0)) / max(float(np.abs(b).max(initial=0)), 1e-30)
    rms_error = relative_rms(a, b)
    error = max_error if limit.metric == "max" else rms_error
    worst = np.unravel_index(difference.argmax(), difference.shape) if difference.size else ()
    positions: list[float] = []
    if tap is not None and (rows := by_token(tap, difference)) is not None:
        norms = np.linalg.norm(by_token(tap, b), axis=1)  # type: ignore[arg-type]
        least = max(float(np.sqrt(np.mean(norms**2))) * 1e-6, 1e-30)
        positions = (np.linalg.norm(rows, axis=1) / np.maximum(norms, least)).tolist()
    passed = error <= limit.value and not differing
    return subject.judged(
        limit, max_error, rms_error, passed, [int(i) for i in worst], positions, remark
    )


def relative_rms(actual: Array, expected: Array) -> float:
    """‖a−b‖ / ‖b‖, in float64."""
    a, b = actual.astype(np.float64), expected.astype(np.float64)
    return float(np.linalg.norm(a - b)) / max(float(np.linalg.norm(b)), 1e-30)
