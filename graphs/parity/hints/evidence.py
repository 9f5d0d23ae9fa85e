"""A failed case, and how a fault is told from a mere difference.

A hypothesis predicts, from what the graph itself computed and read up to the first bad tap, what
that tap would be if one fault were in place. It is believed only where the prediction explains
nearly all of the difference to the reference, and where the same computation without the fault does
not: else what was read is at fault, not what was made of it. A random difference is explained by no
fault and gets no hint; no hint is better than a wrong one.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from graphs.contract.config import ModelConfig
from graphs.contract.spec import BuildSpec, GraphSpec, TapSpec
from graphs.contract.tensorfile import Array, TensorFile
from graphs.parity.compare import ReplayCase
from graphs.parity.findings import Hint
from graphs.parity.replay import expected_tap, golden_inputs

MATCH = 0.02  # largest share of a difference that an accepted hypothesis leaves unexplained


@dataclass(frozen=True)
class Candidate:
    """One fault's prediction of a tensor. `match`: the share that it may leave unexplained."""

    cause: str
    text: str
    predicted: Array
    match: float = MATCH


@dataclass(frozen=True)
class Evidence:
    """A case: what the graph computed, by tap in the reference's layout, and what it read."""

    spec: BuildSpec
    case: ReplayCase
    graph: GraphSpec
    golden: TensorFile
    found: Mapping[str, Array]
    weights: Mapping[str, Array]

    @property
    def config(self) -> ModelConfig:
        return self.spec.config

    @property
    def inputs(self) -> dict[str, Array]:
        return golden_inputs(self.golden)

    def tap(self, name: str) -> TapSpec:
        return next(t for t in self.graph.taps if t.name == name)

    def computed(self, name: str) -> Array:
        """What the graph computed, in float64."""
        return self.found[name].astype(np.float64)

    def expected(self, name: str) -> Array:
        """What the reference computed, in float64."""
        return expected_tap(self.golden, self.tap(name)).astype(np.float64)

    def weight(self, name: str) -> Array:
        return self.weights[name].astype(np.float64)

    def best(
        self,
        tap: str,
        candidates: Iterable[Candidate],
        found: Array,
        expected: Array,
        faultless: Array | None = None,
    ) -> list[Hint]:
        """A hint for the candidate that explains most of found − expected, if one does.

        `faultless` is the prediction with no fault. What a graph stores in 16 bits is predicted as
        stored.
        """
        difference, dtype = float(np.linalg.norm(found - expected)), self.found[tap].dtype

        def unexplained(predicted: Array) -> float:
            stored = predicted.astype(dtype).astype(np.float64)
            return float(np.linalg.norm(stored - found)) / max(difference, 1e-300)

        if faultless is not None and unexplained(faultless) <= MATCH:
            return []
        left: list[tuple[float, Candidate]] = []
        for candidate in candidates:
            share = unexplained(candidate.predicted)
            if share <= candidate.match:
                left.append((share, candidate))
        if not left:
            return []
        share, candidate = min(left, key=lambda pair: pair[0])
        evidence = f"this leaves {share:.1e} of the difference unexplained"
        return [make_hint(self.case, tap, candidate.cause, candidate.text, evidence)]


def make_hint(case: ReplayCase, tap: str, cause: str, text: str, evidence: str) -> Hint:
    """text and evidence become sentences."""
    sentences = [f"{part[0].upper()}{part[1:]}." for part in (text, evidence)]
    return Hint(case.name, tap, cause, *sentences)
