"""A report's figures as pictures."""

from pathlib import Path
from typing import Any

import matplotlib

from bench.speed.bars import SpeedBar
from bench.speed.dense_block import INVARIANT, OURS, TRANSFORMERS
from bench.speed.tables import steps_of
from runtime.benchmark.measurements import BenchReport, Measurement

matplotlib.use("Agg")  # no screen
from matplotlib import pyplot

COLOURS = {
    OURS: "#0b6e4f",
    INVARIANT: "#73b79d",
    TRANSFORMERS[0]: "#c1440e",
    TRANSFORMERS[1]: "#e08e45",
}
MET, MISSED, FLOOR = "#0b6e4f", "#c1440e", "#555555"


def decode_plot(report: BenchReport, path: Path) -> None:
    """Milliseconds of a lone token over the rows cached before it, with quartiles; the floor."""
    figure, axes = pyplot.subplots(figsize=(7, 4.2), layout="constrained")
    for by, colour in COLOURS.items():
        _line(axes, by, _lone(report, by), colour)
    floors = [
        (m.case["cached"], m.floor_seconds * 1e3) for m in _lone(report, OURS) if m.floor_seconds
    ]
    label = "floor: bytes over bandwidth"
    axes.plot(*zip(*floors, strict=True), label=label, color=FLOOR, linestyle=":")
    axes.set(xscale="log", yscale="log", xlabel="cached rows", ylabel="ms a step, one token")
    lengths = [m.case["cached"] for m in _lone(report, OURS)]
    axes.set_xticks(lengths, [f"{length:,}" for length in lengths])
    axes.minorticks_off()
    axes.set_title("One dense block at full width, fp32", loc="left", fontsize=11)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, fontsize=9)
    _save(figure, path)


def bars_plot(bars: list[SpeedBar], path: Path) -> None:
    """Each ratio, and its bound as a mark."""
    figure, axes = pyplot.subplots(figsize=(8, 0.6 + 0.45 * len(bars)), layout="constrained")
    places = range(len(bars))[::-1]
    axes.barh(places, [bar.ratio for bar in bars], color=[MET if b.met else MISSED for b in bars])
    for place, bar in zip(places, bars, strict=True):
        axes.plot([bar.bound] * 2, [place - 0.45, place + 0.45], color="black", linewidth=2)
        end = max(bar.ratio, bar.bound)
        axes.text(end, place, f"  {bar.ratio:.2f}", va="center", fontsize=8)
    axes.set_yticks(places, [bar.what for bar in bars], fontsize=8)
    axes.set(xscale="log", xlabel="ratio; the mark is its bound")
    axes.margins(x=0.12)
    _save(figure, path)


def _lone(report: BenchReport, by: str) -> list[Measurement]:
    lone = [m for case, m in steps_of(report, by) if case.rows == 1]
    return sorted(lone, key=lambda m: m.case["cached"])


def _line(axes: Any, by: str, steps: list[Measurement], colour: str) -> None:
    median = [m.median * 1e3 for m in steps]
    spread = [
        [(m.median - m.middle_half[0]) * 1e3 for m in steps],
        [(m.middle_half[1] - m.median) * 1e3 for m in steps],
    ]
    cached = [m.case["cached"] for m in steps]
    axes.errorbar(cached, median, spread, label=by, color=colour, marker="o", capsize=3)


def _save(figure: Any, path: Path) -> None:
    figure.savefig(path, dpi=120, metadata={"Software": None})
    pyplot.close(figure)
