"""A failed case as evidence, and the test that tells a fault from a mere difference.

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
    """A case: the graph's values by tap, in the reference's layout, and its weights and inputs."""

    spec: BuildSpec
    case: ReplayCase
    graph: GraphSpec
    golden: TensorFile
    taps: Mapping[str, Array]
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
        """The graph's value of a tap, in float64."""
        return self.taps[name].astype(np.float64)

    def expected(self, name: str) -> Array:
        """The reference's value of a tap, in float64."""
        return expected_tap(self.golden, self.tap(name)).astype(np.float64)

    def weight(self, name: str) -> Array:
        return self.weights[name].astype(np.float64)

    def best(
        self,
        tap: str,
        candidates: Iterable[Candidate],
        actual: Array,
        expected: Array,
        faultless: Array | None = None,
    ) -> list[Hint]:
        """A hint for the candidate that explains most of actual − expected, if one does.

        `faultless` is the prediction with no fault. Predictions are rounded to the type in which
        the graph stores the tap.
        """
        difference, dtype = float(np.linalg.norm(actual - expected)), self.taps[tap].dtype

        def unexplained(predicted: Array) -> float:
            stored = predicted.astype(dtype).astype(np.float64)
            return float(np.linalg.norm(stored - actual)) / max(difference, 1e-300)

        if faultless is not None and unexplained(faultless) <= MATCH:
            return []
        matches: list[tuple[float, Candidate]] = []
        for candidate in candidates:
            share = unexplained(candidate.predicted)
            if share <= candidate.match:
                matches.append((share, candidate))
        if not matches:
            return []
        share, candidate = min(matches, key=lambda pair: pair[0])
        evidence = f"this leaves {share:.1e} of the difference unexplained"
        return [make_hint(self.case, tap, candidate.cause, candidate.text, evidence)]


def make_hint(case: ReplayCase, tap: str, cause: str, text: str, evidence: str) -> Hint:
    """text and evidence become sentences."""
    sentences = [f"{part[0].upper()}{part[1:]}." for part in (text, evidence)]
    return Hint(case.name, tap, cause, *sentences)
