"""The builder's figures of built engines, held against their budgets.

Expected is the most scratch that an engine takes where nothing is copied, computed from the config
(graphs.engines.activation_budget), and the constants that the builder makes of any graph: weights
would lie there that are not inputs. An engine fails that takes over 10 % more. Of scratch, that is
its budget, above which `graphs compile` warns; it is computed anew here, since a manifest has the
one of the version that built it.
"""

from dataclasses import dataclass
from pathlib import Path

from graphs.contract.manifest import ENGINE_MODES, EngineMode, EngineRecord
from graphs.contract.spec import GRAPHS, BuildSpec, GraphName
from graphs.engines.activation_budget import MARGIN, expected_activation
from graphs.engines.table import EngineFolder

CONSTANTS = 8_000  # bytes; TensorRT-RTX 1.7.1 makes half as many, whatever the model


@dataclass(frozen=True)
class Built:
    """One figure of an engine in bytes, None where the builder logged none, and what is expected.

    `mode` is None for its constants, which both modes share.
    """

    model: str
    precision: str
    target: str
    graph: GraphName
    mode: EngineMode | None
    logged: int | None
    expected: int

    @property
    def share(self) -> float | None:
        return None if self.logged is None else self.logged / self.expected

    @property
    def too_much(self) -> bool:
        return self.share is not None and self.share > MARGIN

    def __str__(self) -> str:
        what = "constants" if self.mode is None else f"scratch in {self.mode}"
        return (
            f"{self.model} {self.precision}, {self.target}, {self.graph}: expected at most "
            f"{self.expected:,} bytes of {what} and {MARGIN - 1:.0%} more, got {self.logged:,}; a "
            "weight or the cache is likely copied: `python -m graphs lint` names a rule that is "
            "broken, `compile` what may be copied"
        )


def built_engines(manifest: Path) -> list[Built]:
    """Read build/<model>/<precision>/<folder>/manifest.json, with spec.json beside the folder.

    Raises BuildError.
    """
    engines = EngineFolder.load(manifest)
    spec = BuildSpec.load(manifest.parent.parent)
    return [
        figure
        for graph in GRAPHS
        if (record := engines.manifest.engines.get(graph))
        for figure in _figures(engines, spec, graph, record)
    ]


def _figures(
    engines: EngineFolder, spec: BuildSpec, graph: GraphName, record: EngineRecord
) -> list[Built]:
    profile, target = engines.manifest.profile, engines.manifest.target
    activations = [
        (mode, record.activation_bytes[mode], expected_activation(spec, graph, mode, profile))
        for mode in ENGINE_MODES
    ]
    return [
        Built(engines.model, spec.precision, target, graph, mode, size, expected)
        for mode, size, expected in (*activations, (None, record.weight_bytes, CONSTANTS))
    ]
