"""One name for one thing, and none that only points: read from the sources."""

import ast
import functools
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.builds import ROOT

FOLDERS = ("export", "graphs", "runtime", "bench")

# They point at a thing and do not say what it is.
POINTING = {"found", "of", "own", "beside", "taking", "its", "told", "theirs", "asked", "Asked"}

# The same layer as the checkpoint has it and as the engines have it.
TWICE = {"RMSNorm", "SwiGLU", "Gate"}

# How messages read before: the order of reading is "expected X, got Y".
OLD_ORDER = re.compile(r"expected, (found|got)\b|\bfound, (expected|supported|at least|at most)\b")


@functools.cache
def sources(*folders: str) -> dict[str, ast.Module]:
    paths: list[Path] = [p for folder in folders for p in sorted((ROOT / folder).rglob("*.py"))]
    return {str(p.relative_to(ROOT)): ast.parse(p.read_text("utf-8")) for p in paths}


def bound_names(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Every name that a module binds, fields and parameters included, with its line."""
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name, ctx=ast.Store(), lineno=line):
                yield name, line
            case ast.arg(arg=name, lineno=line):
                yield name, line
            case ast.FunctionDef(name=name, lineno=line) | ast.ClassDef(name=name, lineno=line):
                yield name, line
            case ast.MatchAs(name=str(name), lineno=line):
                yield name, line


def texts(tree: ast.AST) -> Iterator[str]:
    """Every string, f-strings with their values as …."""
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            parts = (part.value if isinstance(part, ast.Constant) else "…" for part in node.values)
            yield "".join(map(str, parts))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def public_types(tree: ast.Module) -> Iterator[str]:
    """Classes and type aliases of a module; a constant is written in capitals."""
    for node in tree.body:
        match node:
            case ast.ClassDef(name=name):
                yield name
            case ast.Assign(targets=[ast.Name(id=name)]) if (
                not name.isupper() and name[0].isupper()
            ):
                yield name


def test_the_walks_see_names_texts_and_types() -> None:
    tree = ast.parse(
        "class Aa:\n    found: int = 1\nBb = int\nCC = 1\n"
        "def f(own, *, told=f'{1} expected, found {2}'):\n    for of in own: pass\n"
    )
    names = {name for name, _ in bound_names(tree)}
    assert names & POINTING == {"found", "own", "told", "of"}
    assert [text for text in texts(tree) if OLD_ORDER.search(text)]
    assert list(public_types(tree)) == ["Aa", "Bb"]


@pytest.mark.parametrize("folder", FOLDERS)
def test_no_name_only_points(folder: str) -> None:
    assert not [
        f"{path}:{line}: {name}"
        for path, tree in sources(folder).items()
        for name, line in bound_names(tree)
        if name in POINTING
    ]


def test_a_type_has_a_name_of_its_own() -> None:
    places: dict[str, list[str]] = defaultdict(list)
    for path, tree in sources(*FOLDERS).items():
        for name in public_types(tree):
            if not name.startswith("_"):
                places[name].append(path)
    repeated = {name: paths for name, paths in places.items() if len(paths) > 1}
    assert set(repeated) == TWICE, repeated
    assert all(len(repeated[name]) == 2 for name in TWICE)


@pytest.mark.parametrize("folder", FOLDERS)
def test_messages_say_what_was_expected_first(folder: str) -> None:
    assert not [
        f"{path}: {text}"
        for path, tree in sources(folder).items()
        for text in texts(tree)
        if OLD_ORDER.search(text)
    ]
