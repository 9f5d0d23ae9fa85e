"""Which module may import what: export → graphs ← runtime, and each heavy package in its place."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import Build

ROOT = Path(__file__).parent.parent
PACKAGES = ("export", "graphs", "runtime")
COMPILERS = {"tensorrt", "tensorrt_rtx", "polygraphy"}
HEAVY = {"torch", "transformers", "onnxscript", "onnx_ir", "numba", "matplotlib"}


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


def modules_after(script: str, *arguments: str) -> list[str]:
    """The heavy packages that a fresh interpreter has imported when the script has run."""
    heavy = sorted(COMPILERS | HEAVY | {"export"})
    shown = f"\nimport sys\nprint([name for name in {heavy} if name in sys.modules])\n"
    done = subprocess.run(
        [sys.executable, "-c", script + shown, *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: list[str] = ast.literal_eval(done.stdout.splitlines()[-1])
    return found


def test_the_interpreter_tells_what_it_imported() -> None:
    assert modules_after("import onnx_ir, polygraphy.config") == ["onnx_ir", "polygraphy"]


def test_importing_all_of_the_runtime_needs_neither_torch_nor_a_compiler() -> None:
    """Nor does importing what runs on a GPU, or `graphs`: they import torch inside functions."""
    names = [path.removesuffix(".py").replace("/", ".") for path in modules("runtime")]
    imports = [f"import {name.removesuffix('.__init__')}" for name in names]
    assert modules_after("\n".join(imports)) == []


def test_generating_on_the_cpu_needs_neither_torch_nor_a_compiler(nano: Build) -> None:
    """Sampling included; and no command's packages either."""
    script = (
        "import sys\n"
        "from runtime import LLM, SamplingParams\n"
        "with LLM.load(sys.argv[1], threads=1) as llm:\n"
        "    for sampling in (SamplingParams(), SamplingParams(temperature=1, top_p=0.9)):\n"
        "        done = llm.generate(['And it'], max_new_tokens=2, sampling=sampling)\n"
        "        assert done[0].error is None and len(done[0].tokens) == 2\n"
        "assert not {'typer', 'rich'} & set(sys.modules), 'the command line'\n"
    )
    assert modules_after(script, str(nano("fp32"))) == []


def test_a_command_of_graphs_imports_no_exporter() -> None:
    """The builders' processes and the commands start the sooner: onnxscript takes 0.6 s."""
    assert modules_after("import graphs.__main__") == []
