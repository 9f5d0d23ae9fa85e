"""What quantising to e4m3 does: the scales' sizes, and values at the peak or flushed to zero."""

import re
from collections import Counter
from collections.abc import Callable, Sequence

from graphs.parity.findings import FP8Stats
from graphs.report.figures import figure, grouped, table
from graphs.report.markup import Markup
from graphs.report.svg import Bar, bar_chart
from graphs.report.wording import number, share

KINDS = ("activation", "weight")


def scale_figures(fp8: Sequence[FP8Stats]) -> list[Markup]:
    """A histogram per module, activations first; those of a kind have one x axis."""
    figures = []
    for kind in KINDS:
        stats = [s for s in fp8 if s.kind == kind]
        bins = [place for s in stats for place, _ in s.log2_scale]
        for (_, module), group in _by_module(stats).items():
            counts: Counter[int] = Counter()
            for s in group:
                counts.update(dict(s.log2_scale))
            figures.append(_histogram(kind, module, counts, range(min(bins), max(bins) + 1)))
    return figures


def _histogram(kind: str, module: str, counts: Counter[int], bins: range) -> Markup:
    rows = counts.total()
    every = max(1, -(-len(bins) // 5))
    bars = [
        Bar(
            [(100 * counts[b] / rows, kind)],
            f"scale 2^{b} to 2^{b + 1}: {counts[b]:,} rows, {share(counts[b], rows)}",
            str(b) if (b - bins.start) % every == 0 else "",
        )
        for b in bins
    ]
    plot = bar_chart(f"{kind} scales of {module}", bars, "log2 of the scale", 250, 110)
    return figure(module, [(f"{kind}, % of {rows:,} rows", kind)], plot)


def saturation_figures(fp8: Sequence[FP8Stats]) -> list[Markup]:
    """The shares of values at the peak, and of activations flushed to 0: a bar per module."""
    activations = [s for s in fp8 if s.kind == "activation"]
    return [
        _shares("values at ±448", fp8, lambda s: s.at_peak),
        _shares("activations flushed to 0", activations, lambda s: s.flushed),
    ]


def _shares(title: str, fp8: Sequence[FP8Stats], some: Callable[[FP8Stats], int]) -> Markup:
    bars = []
    for (kind, module), group in _by_module(fp8).items():
        part, values = sum(map(some, group)), sum(s.values for s in group)
        text = f"{module}, {kind}: {part:,} of {values:,} values, {share(part, values)}"
        bars.append(Bar([(100 * part / max(values, 1), kind)], text, module))
    width = max(300, 90 + 28 * len(bars))
    plot = bar_chart(title, bars, "linear layer", width, 150, steep=True)
    kinds = grouped(fp8, lambda s: s.kind)
    return figure(f"{title}, %", [(kind, kind) for kind in kinds], plot)


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
        a_row = number(peaks / max(scales, 1))
        figures = f"{values:,}", share(peaks, values), a_row, flushed, worst
        rows.append((module, kind, *figures, f"{scales:,}", f"{floor:,}"))
    columns = (
        "module",
        "of its",
        "values",
        "at ±448",
        "at ±448, a row",
        "flushed to 0",
        "flushed, worst layer",
        "rows",
        "rows at the least scale",
    )
    return table(columns, rows, numeric=range(3, 10))


def _flushed(stats: Sequence[FP8Stats]) -> tuple[str, str]:
    """The share of values flushed to 0, in all and in the layer where it is largest."""

    def parts(some: Sequence[FP8Stats]) -> tuple[int, int]:
        return sum(s.flushed for s in some), sum(s.values for s in some)

    layers = {n: parts(group) for n, group in grouped(stats, lambda s: s.layer).items()}
    worst = max(layers, key=lambda n: layers[n][0] / max(layers[n][1], 1))
    return share(*parts(stats)), f"{share(*layers[worst])} in layer {worst}"
