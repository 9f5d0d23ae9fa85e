"""Plots of where the error is: by tap and by layer, each as a list of figures."""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from graphs.contract.spec import GOLDEN_MODES, GRAPHS
from graphs.parity.findings import SOURCES, TapComparison
from graphs.report.figures import figure, grouped
from graphs.report.markup import Markup
from graphs.report.merge import BuildFindings
from graphs.report.svg import Axis, Point, Series, log_chart
from graphs.report.wording import ERROR_NAMES, limit_share, limit_text, number, where

ORDER: tuple[str, ...] = (*GRAPHS, "chain")
ALL = "all cases"  # the name of what has no mode


def tap_figures(build: BuildFindings) -> list[Markup]:
    """A plot per graph and per way of running it: a line per mode through its worst layer."""
    figures = []
    for source in SOURCES:
        rows = build.rows_of(source)
        groups = grouped(rows, lambda r: (r.graph, r.fed))
        for graph, fed in sorted(groups, key=lambda key: (ORDER.index(key[0]), not key[1])):
            if graph == "chain":
                title = "the whole chain"
            else:
                title = (
                    f"{graph}, graph alone" if source == "graphs" else f"{graph}, on the backend"
                )
            figures.append(_by_tap(title + (", fed" if fed else ""), groups[graph, fed]))
    return figures


def _by_tap(title: str, rows: Sequence[TapComparison]) -> Markup:
    place: dict[str, int] = {}
    for row in sorted(rows, key=lambda r: (r.order, r.tap)):
        place.setdefault(row.tap, len(place))
    limits = {
        place[tap]: min(r.limit for r in group)
        for tap, group in grouped(rows, lambda r: r.tap).items()
    }
    axis = Axis(
        "tap, in the order of the dataflow",
        -0.5,
        len(place) - 0.5,
        [(at, tap) for tap, at in place.items()],
        steep=True,
    )
    chart = log_chart(
        f"{title}: error per tap",
        _series(rows, lambda r: place[r.tap], lambda r: r.error),
        [(at - 0.5, at + 0.5, value) for at, value in sorted(limits.items())],
        axis,
        max(300, 90 + 25 * len(place)),
    )
    inexact = [r.metric for r in rows if r.limit]  # positions and masks have to be equal
    ((metric, _),) = Counter(inexact).most_common(1) or [("max", 0)]
    return figure(f"{title}: {ERROR_NAMES[metric]}", _mode_names(rows), chart, "limit")


def layer_figures(build: BuildFindings) -> list[Markup]:
    """Each layer's worst tensor as a share of its limit, a line per mode."""
    titles = {
        (False, False): "blocks",
        (False, True): "blocks, fed",
        (True, False): "the whole chain",
    }
    figures = []
    rows = [r for r in build.rows if r.layer is not None]
    for key, group in sorted(grouped(rows, lambda r: (r.graph == "chain", r.fed)).items()):
        layers = sorted({r.layer for r in group if r.layer is not None})
        low, high = layers[0] - 0.5, layers[-1] + 0.5
        every = max(1, math.ceil(len(layers) / 20))
        labels = [(float(layer), str(layer)) for layer in layers[::every]]
        chart = log_chart(
            f"{titles[key]}: error per layer",
            _series(group, lambda r: r.layer or 0, limit_share),
            [(low, high, 1.0)],
            Axis("layer", low, high, labels),
            min(max(300, 90 + 60 * len(layers)), 900),
        )
        title = f"{titles[key]}: worst error as a share of its limit"
        figures.append(figure(title, _mode_names(group), chart, "limit"))
    return figures


def _series(
    rows: Sequence[TapComparison],
    x: Callable[[TapComparison], int],
    y: Callable[[TapComparison], float],
) -> list[Series]:
    """A line per mode through the worst at each x; the others as its cloud."""
    series = []
    for mode, group in _by_mode(rows):
        points, cloud = [], []
        for at, here in sorted(grouped(group, x).items()):
            worst = max(here, key=lambda r: (not r.passed, limit_share(r)))
            points.append(Point(at, y(worst), _tooltip(worst), not worst.passed))
            cloud += [(float(at), y(r)) for r in here if r is not worst]
        series.append(Series(mode or ALL, _color(mode), points, sorted(set(cloud))))
    return series


def _by_mode(rows: Iterable[TapComparison]) -> list[tuple[str | None, list[TapComparison]]]:
    groups = grouped(rows, lambda r: r.mode)
    return [(mode, groups[mode]) for mode in (*GOLDEN_MODES, None) if mode in groups]


def _color(mode: str | None) -> int:
    return next((i for i, name in enumerate(GOLDEN_MODES) if name == mode), len(GOLDEN_MODES))


def _mode_names(rows: Iterable[TapComparison]) -> list[tuple[str, str]]:
    return [(mode or ALL, f"s{_color(mode)}") for mode, _ in _by_mode(rows)]


def _tooltip(row: TapComparison) -> str:
    verdict = "" if row.passed else " FAILED"
    return (
        f"{row.tap} ({row.symbol})\n{where(row)}\n{ERROR_NAMES[row.metric]} {number(row.error)}, "
        f"limit {limit_text(row.limit)}{verdict}"
    )
