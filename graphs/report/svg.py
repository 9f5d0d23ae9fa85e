"""A plot as inline SVG: errors on a logarithmic axis.

Colours are classes of the page's style sheet, so a plot follows its light and dark schemes. Points
carry their figures as tooltips.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from graphs.report.markup import Markup, element, join

LEFT, RIGHT, TOP = 58, 16, 10  # margins, in pixels
HEIGHT = 210  # of the area that is plotted in
BAND = 24  # at its edges, for 0 and for what is not finite: neither has a logarithm
SUPERSCRIPT = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


@dataclass(frozen=True)
class Point:
    """A marked point, with its tooltip."""

    x: float
    y: float
    title: str
    bad: bool = False


@dataclass(frozen=True)
class Series:
    """A line through points; behind it, a cloud of dots (x, y) that are not marked."""

    name: str
    color: int
    points: Sequence[Point]
    cloud: Sequence[tuple[float, float]] = ()

    @property
    def values(self) -> list[float]:
        return [p.y for p in self.points] + [y for _, y in self.cloud]


@dataclass(frozen=True)
class Axis:
    """An x axis from `low` to `high`: its name, and labels (x, text), steep where they are long."""

    name: str
    low: float
    high: float
    labels: Sequence[tuple[float, str]]
    steep: bool = False

    @property
    def below(self) -> float:
        """Pixels that labels and name take under the plot."""
        if not self.steep:
            return 38
        return 30 + 4.6 * max((len(text) for _, text in self.labels), default=0)


@dataclass(frozen=True)
class _LogScale:
    """Whole decades that hold all values, and the edges for those that have no logarithm."""

    low: int
    high: int
    zero: bool
    infinite: bool

    @classmethod
    def holding(cls, values: Sequence[float]) -> "_LogScale":
        logs = [math.log10(v) for v in values if math.isfinite(v) and v > 0] or [0.0]
        low = math.floor(min(logs))
        high = max(low + 1, math.ceil(max(logs)))
        return cls(low, high, 0 in values, not all(map(math.isfinite, values)))

    def y(self, value: float) -> float:
        top = TOP + (BAND if self.infinite else 0)
        bottom = TOP + HEIGHT - (BAND if self.zero else 0)
        if not math.isfinite(value):
            return TOP + BAND / 2
        if value <= 0:
            return TOP + HEIGHT - BAND / 2
        return bottom - (math.log10(value) - self.low) / (self.high - self.low) * (bottom - top)

    def ticks(self) -> list[tuple[float, str]]:
        step = math.ceil((self.high - self.low) / 8)
        decades = range(self.low, self.high + 1, step)
        ticks = [(self.y(10.0**d), f"10{str(d).translate(SUPERSCRIPT)}") for d in decades]
        ticks += [(self.y(0), "0")] if self.zero else []
        return ticks + ([(self.y(math.inf), "NaN, ∞")] if self.infinite else [])


def log_chart(
    label: str,
    series: Sequence[Series],
    limits: Sequence[tuple[float, float, float]],
    axis: Axis,
    width: float,
) -> Markup:
    """Lines over a logarithmic y axis. limits: dashes from x to x at a height; label: spoken."""
    scale = _LogScale.holding([v for s in series for v in s.values] + [y for *_, y in limits])

    def x(value: float) -> float:
        return LEFT + (value - axis.low) / (axis.high - axis.low) * (width - LEFT - RIGHT)

    parts = [_grid(scale.ticks(), width), _labels(axis, x)]
    for start, end, height in limits:
        d = f"M{x(start):.1f} {scale.y(height):.1f}H{x(end):.1f}"
        parts.append(element("path", class_="limit", d=d))
    for s in series:
        cloud = "".join(f"M{x(a):.1f} {scale.y(b):.1f}h0" for a, b in s.cloud)
        line = "L".join(f"{x(p.x):.1f} {scale.y(p.y):.1f}" for p in s.points)
        if cloud:
            parts.append(element("path", class_=f"cloud s{s.color}", d=cloud))
        parts.append(element("path", class_=f"line s{s.color}", d=f"M{line}"))
    marked = [(s, p) for s in series for p in s.points]
    for s, p in sorted(marked, key=lambda pair: pair[1].bad):  # those that failed in front
        title = element("title", p.title)
        place = {"cx": f"{x(p.x):.1f}", "cy": f"{scale.y(p.y):.1f}", "r": 4.5 if p.bad else 3}
        classes = f"dot s{s.color} bad" if p.bad else f"dot s{s.color}"
        parts.append(element("circle", title, class_=classes, **place))
    return _svg(label, width, TOP + HEIGHT + axis.below, parts)


def _grid(ticks: Sequence[tuple[float, str]], width: float) -> Markup:
    lines = "".join(f"M{LEFT} {y:.1f}H{width - RIGHT:.1f}" for y, _ in ticks)
    texts = (
        element("text", text, class_="end", x=LEFT - 6, y=f"{y + 3.5:.1f}") for y, text in ticks
    )
    return join(element("path", class_="grid", d=lines), *texts)


def _labels(axis: Axis, x: Callable[[float], float]) -> Markup:
    y = TOP + HEIGHT + 15
    texts = []
    for value, text in axis.labels:
        if axis.steep:
            turn = f"translate({x(value) + 4:.1f} {y - 3})rotate(-45)"
            texts.append(element("text", text, class_="end", transform=turn))
        else:
            texts.append(element("text", text, class_="middle", x=f"{x(value):.1f}", y=y))
    middle = (x(axis.low) + x(axis.high)) / 2
    bottom = f"{TOP + HEIGHT + axis.below - 6:.1f}"
    name = element("text", axis.name, class_="middle name", x=f"{middle:.1f}", y=bottom)
    return join(*texts, name)


def _svg(label: str, width: float, height: float, parts: Sequence[Markup]) -> Markup:
    size = {"width": f"{width:.0f}", "height": f"{height:.0f}"}
    box = f"0 0 {width:.0f} {height:.0f}"
    return element("svg", *parts, role="img", aria_label=label, viewBox=box, **size)
