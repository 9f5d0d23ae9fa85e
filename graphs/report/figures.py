"""Building blocks of the page's plots and tables: a captioned figure, a table, and grouping."""

from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from graphs.report.markup import Markup, element

Key = TypeVar("Key")
Item = TypeVar("Item")
FAILED = "FAILED"


def badge(verdict: str, **attributes: object) -> Markup:
    """A verdict, passed or failed, in its colour."""
    return element("strong", verdict, class_=f"badge {verdict}", **attributes)


def figure(title: str, names: Sequence[tuple[str, str]], plot: Markup, limit: str = "") -> Markup:
    """A plot under its title and a legend of (name, class); limit: what the dashed line is."""
    keys = [
        element("span", element("i", class_=f"key {kind}"), name, class_="legend")
        for name, kind in names
    ]
    if limit:
        keys.append(element("span", element("i", class_="key dashes"), limit, class_="legend"))
    head = element("figcaption", element("b", title), *keys)
    return element("figure", head, element("div", plot, class_="scroll"))


def grouped(items: Iterable[Item], key: Callable[[Item], Key]) -> dict[Key, list[Item]]:
    """Items by their key, in the order in which the keys come up."""
    groups: dict[Key, list[Item]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


def table(
    columns: Sequence[str],
    rows: Iterable[Sequence[str]],
    numeric: Iterable[int] = (),
    kind: str = "",
) -> Markup:
    """A table in a box that scrolls; a row with a cell FAILED stands out.

    numeric: columns of figures, counted from 1; kind: the table's class, if it has one.
    """
    classes = " ".join([*kind.split(), *(f"n{column}" for column in numeric)])
    lines = (
        element("tr", *(element("td", c) for c in row), class_="bad" if FAILED in row else None)
        for row in rows
    )
    head = element("thead", element("tr", *(element("th", c) for c in columns)))
    content = element("table", head, element("tbody", *lines), class_=classes or None)
    return element("div", content, class_="scroll")
