"""The engines of several builds as one Markdown table, from their manifests."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from graphs.contract.manifest import ENGINE_MODES, EngineRecord, Manifest
from graphs.contract.spec import GRAPHS, BuildError, GraphName

HEAD = (
    *("model", "engine", "file, MB"),
    *(f"activation, {mode}, MB" for mode in ENGINE_MODES),
    *(f"launches, {mode}" for mode in ENGINE_MODES),
    "FP8 products",
)


@dataclass(frozen=True)
class EngineFolder:
    """One manifest's content; the model and the precision are in its path only."""

    model: str
    precision: str
    manifest: Manifest

    @classmethod
    def load(cls, path: Path) -> "EngineFolder":
        """Read build/<model>/<precision>/<folder>/manifest.json. Raises BuildError."""
        parts = path.absolute().parts
        if path.name != "manifest.json" or len(parts) < 5:
            raise BuildError(
                f"path: expected build/<model>/<precision>/<folder>/manifest.json, got {path}"
            )
        return cls(parts[-4], parts[-3], Manifest.load(path.parent))


def engine_table(paths: Iterable[Path]) -> str:
    """A row per model and engine, and a line on building them. Raises BuildError.

    Figures are those of the first target named; where another target's differ, they follow. Models
    with the same figures share their rows.
    """
    every = [EngineFolder.load(path) for path in paths]
    records = [record for e in every for record in e.manifest.engines.values()]
    if not records:
        raise BuildError("no engine in any manifest; make them with `python -m graphs compile`")
    precision = _same("precision", [e.precision for e in every])
    compiler = _same("compiler", [e.manifest.compiler for e in every])
    profile = _same("profile", [e.manifest.profile.name for e in every])
    models: dict[tuple[tuple[str, ...], ...], list[str]] = {}  # by their rows
    for model in dict.fromkeys(e.model for e in every):
        manifests = {e.manifest.target: e.manifest for e in every if e.model == model}
        rows = tuple((f"`{g}`", *_cells(manifests, g)) for g in GRAPHS)
        models.setdefault(rows, []).append(f"`{model}`")
    lines = [_row(HEAD), _row(("---", "---", *("---:" for _ in HEAD[2:])))]
    for rows, names in models.items():
        lines += [_row((", ".join(names), *cells)) for cells in rows]
    slowest = max(record.seconds for record in records)
    memory = max(record.peak_resident_bytes for record in records)
    targets = ", ".join(dict.fromkeys(e.manifest.target.upper() for e in every))
    lines += [
        "",
        f"{len(records)} {precision} engines by {compiler} for {targets}, profile {profile}, each "
        f"built in at most {slowest:.1f} s and {memory / 1e6:.0f} MB of memory.",
    ]
    return "\n".join(lines)


def _same(what: str, values: Sequence[str]) -> str:
    """The one value of all. Raises BuildError where they differ."""
    if len(set(values)) > 1:
        raise BuildError(f"expected one {what}, got {', '.join(sorted(set(values)))}")
    return values[0]


def _cells(manifests: dict[str, Manifest], graph: GraphName) -> Iterable[str]:
    figures = {target: _figures(m.engines.get(graph)) for target, m in manifests.items()}
    first, *others = figures
    for column, value in enumerate(figures[first]):
        differ = [t for t in others if figures[t][column] != value]
        notes = ", ".join(f"{t.upper()}: {figures[t][column]}" for t in differ)
        yield f"{value} ({notes})" if notes else value


def _figures(record: EngineRecord | None) -> list[str]:
    if record is None:
        return ["–"] * len(HEAD[2:])
    sizes = (record.bytes, *(record.activation_bytes[mode] for mode in ENGINE_MODES))
    return [
        *("–" if size is None else f"{size / 1e6:.1f}" for size in sizes),
        *(record.launches(mode) for mode in ENGINE_MODES),
        record.fp8_products,
    ]


def _row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"
