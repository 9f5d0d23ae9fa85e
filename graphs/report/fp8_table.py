"""A table of what quantising to e4m3 does: scales, values at the peak, values flushed to zero."""

import re
from collections.abc import Sequence

from graphs.parity.findings import FP8Stats
from graphs.report.figures import grouped, table
from graphs.report.markup import Markup
from graphs.report.wording import number, share

KINDS = ("activation", "weight")


def _by_module(fp8: Sequence[FP8Stats]) -> dict[tuple[str, str], list[FP8Stats]]:
    """By kind and module, activations first; which slot an expert ran in says nothing of it."""
    ordered = sorted(fp8, key=lambda s: KINDS.index(s.kind))
    return grouped(ordered, lambda s: (s.kind, re.sub(r"^slots\.\d+", "experts", s.module)))


def saturation_table(fp8: Sequence[FP8Stats]) -> Markup:
    """A line per module and kind, over all its layers and cases, with the worst layer's share."""
    rows = []
    for (kind, module), group in _by_module(fp8).items():
        values, scales = sum(s.values for s in group), sum(s.rows for s in group)
        peaks = sum(s.at_peak for s in group)
        flushed, worst = _flushed(group) if kind == "activation" else ("–", "–")
        floor = sum(s.floor_rows for s in group)
        bins = [place for s in group for place, _ in s.log2_scale]
        span = f"2^{min(bins)} to 2^{max(bins) + 1}" if bins else "–"
        a_row = number(peaks / max(scales, 1))
        figures = f"{values:,}", share(peaks, values), a_row, flushed, worst
        rows.append((module, kind, *figures, f"{scales:,}", span, f"{floor:,}"))
    columns = (
        "module",
        "kind",
        "values",
        "at ±448",
        "at ±448, a row",
        "flushed to 0",
        "flushed, worst layer",
        "rows",
        "their scales",
        "rows at the least scale",
    )
    return table(columns, rows, numeric=range(3, 11))


def _flushed(stats: Sequence[FP8Stats]) -> tuple[str, str]:
    """The share of values flushed to 0, in all and in the layer where it is largest."""

    def parts(some: Sequence[FP8Stats]) -> tuple[int, int]:
        return sum(s.flushed for s in some), sum(s.values for s in some)

    layers = {n: parts(group) for n, group in grouped(stats, lambda s: s.layer).items()}
    worst = max(layers, key=lambda n: layers[n][0] / max(layers[n][1], 1))
    return share(*parts(stats)), f"{share(*layers[worst])} in layer {worst}"
