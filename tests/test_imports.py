"""Which module may import what: export → graphs ← runtime, and each heavy package in its place."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("export", "graphs", "runtime")
COMPILERS = {"tensorrt", "tensorrt_rtx", "polygraphy"}


def modules(folder: str) -> dict[str, ast.Module]:
    """Every module below a folder by its path from the root."""
    paths = sorted((ROOT / folder).rglob("*.py"))
    assert paths, folder
    return {str(p.relative_to(ROOT)): ast.parse(p.read_text("utf-8"), str(p)) for p in paths}


def imported(tree: ast.AST) -> Iterator[str]:
    """Names of imported modules, wherever the import stands, and those given to import_module."""
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                yield from (alias.name for alias in names)
            case ast.ImportFrom(module=module, level=level):
                yield "." * level + (module or "")
            case ast.Call(
                func=ast.Attribute(attr="import_module" | "find_spec")
                | ast.Name(id="import_module" | "__import__" | "_import"),
                args=[ast.Constant(value=str(name)), *_],
            ):
                yield name


def importers(folders: tuple[str, ...], packages: set[str]) -> set[str]:
    """Paths of the modules that import one of these packages."""
    return {
        path
        for folder in folders
        for path, tree in modules(folder).items()
        if {name.split(".")[0] for name in imported(tree)} & packages
    }


def test_the_walk_sees_every_way_to_import() -> None:
    tree = ast.parse(
        "import a.b\n"
        "from c import d\n"
        "from . import e\n"
        "def f():\n"
        "    import g as h\n"
        "    importlib.import_module('i.j')\n"
        "if TYPE_CHECKING:\n"
        "    from k.l import m\n"
    )
    assert sorted(imported(tree)) == [".", "a.b", "c", "g", "i.j", "k.l"]


@pytest.mark.parametrize(
    ("folder", "forbidden"),
    [
        ("export", {"runtime", "tests"}),
        ("runtime", {"export", "tests"}),
        ("graphs", {"export", "runtime", "tests"}),
        ("models", {"runtime", "tests"}),
    ],
)
def test_imports_run_from_export_and_runtime_to_graphs(folder: str, forbidden: set[str]) -> None:
    assert importers((folder,), forbidden) == set()
    if folder != "graphs":
        assert importers((folder,), {"graphs"})


@pytest.mark.parametrize("folder", PACKAGES)
def test_imports_are_absolute(folder: str) -> None:
    for path, tree in modules(folder).items():
        assert not [name for name in imported(tree) if name.startswith(".")], path


def test_one_module_imports_the_compilers() -> None:
    """One more writes Polygraphy's JSON, which needs none of them."""
    compiling, writing = "graphs/tensorrt.py", "graphs/standalone.py"
    assert importers((*PACKAGES, "models"), COMPILERS) == {compiling, writing}
    assert importers((*PACKAGES, "models"), COMPILERS - {"polygraphy"}) <= {compiling}


def test_transformers_is_imported_by_tests_only() -> None:
    assert importers((*PACKAGES, "models"), {"transformers"}) == set()


def test_one_module_of_the_runtime_imports_torch() -> None:
    """For a GPU's memory."""
    assert importers(("runtime",), {"torch"}) == {"runtime/cuda.py"}


def test_running_on_the_cpu_needs_neither_torch_nor_a_compiler() -> None:
    """Nor does importing what runs on a GPU, or `graphs`: they import torch inside functions."""
    names = [path.removesuffix(".py").replace("/", ".") for path in modules("runtime")]
    script = (
        "import importlib, sys\n"
        f"for name in {[n.removesuffix('.__init__') for n in names]}:\n"
        "    importlib.import_module(name)\n"
        f"heavy = {sorted(COMPILERS | {'torch', 'transformers', 'export'})}\n"
        "print([name for name in heavy if name in sys.modules])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"
