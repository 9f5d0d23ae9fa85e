"""Which module may import what: export → graphs ← runtime, and each heavy package in its place."""

import ast
import functools
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.builds import Build

ROOT = Path(__file__).parents[1]
PACKAGES = ("export", "graphs", "runtime")

# Which folder may import which others, each behind all that it may import. `kernels`, `ranks` and
# `server` are not there yet; their directions are.
_C, _OPS, _PASSES = "graphs/contract", "graphs/ops", "graphs/passes"
_SESSION, _PARITY, _REPORT = "graphs/session", "graphs/parity", "graphs/report"
_ENGINES, _KERNELS, _BUDGET = "graphs/engines", "graphs/kernels", "graphs/budget"
_CLI, _SCORING = "graphs/cli", "graphs/scoring"
_REFERENCE, _CHECKPOINT, _ENGINE = "export/reference", "export/checkpoint", "export/engine"
_PACKING, _GOLDEN, _SYNTHETIC = "export/packing", "export/golden", "export/synthetic"
_DEVICES, _CACHE, _BACKENDS = "runtime/devices", "runtime/cache", "runtime/backends"
_STEP, _RANKS, _TOKENIZERS = "runtime/step", "runtime/ranks", "runtime/tokenizers"
_SERVING, _LOAD, _EVALUATE = "runtime/serving", "runtime/load", "runtime/evaluate"
_LLM, _CHAIN_PARITY, _BENCHMARK = "runtime/llm", "runtime/parity", "runtime/benchmark"
_SERVER = "runtime/server"
_STEPS = (_C, _DEVICES, _CACHE, _BACKENDS, _STEP)
DIRECTIONS: tuple[tuple[str, tuple[str, ...]], ...] = (
    (_C, ()),
    (_CLI, (_C,)),
    (_SCORING, (_C,)),
    (_OPS, (_C,)),
    (_PASSES, (_C, _OPS)),
    (_SESSION, (_C, _PASSES)),
    (_PARITY, (_C, _OPS, _PASSES, _SESSION)),
    (_REPORT, (_C, _PARITY)),
    (_ENGINES, (_C, _OPS, _PASSES)),
    (_KERNELS, (_C, _OPS, _ENGINES)),
    (_BUDGET, (_C, _ENGINES, _KERNELS)),
    (
        "graphs/commands",
        (_C, _CLI, _PASSES, _SESSION, _PARITY, _REPORT, _ENGINES, _KERNELS, _BUDGET),
    ),
    ("graphs/__main__", (_C, _CLI, "graphs/commands")),
    (_REFERENCE, (_C,)),
    (_CHECKPOINT, (_C, _REFERENCE)),
    (_ENGINE, (_C, _OPS, _PASSES, _PARITY)),
    (_PACKING, (_C, _REFERENCE, _CHECKPOINT, _ENGINE)),
    (_GOLDEN, (_C, _OPS, _REFERENCE, _CHECKPOINT, _ENGINE, _PACKING)),
    (_SYNTHETIC, (_C, _CHECKPOINT)),
    ("export/__main__", (_C, _CLI, _CHECKPOINT, _ENGINE, _PACKING, _GOLDEN, _SYNTHETIC)),
    (_DEVICES, (_C,)),
    (_CACHE, (_C, _DEVICES)),
    (_BACKENDS, (_C, _SESSION, _ENGINES, _KERNELS, _DEVICES)),
    (_STEP, (_C, _DEVICES, _CACHE, _BACKENDS)),
    (_RANKS, _STEPS),
    (_TOKENIZERS, (_C,)),
    (_SERVING, (*_STEPS, _RANKS, _TOKENIZERS)),
    (_LOAD, (*_STEPS, _RANKS)),
    (_EVALUATE, (_C, _SCORING, _STEP, _TOKENIZERS)),
    (_LLM, (*_STEPS, _SCORING, _TOKENIZERS, _SERVING, _LOAD, _EVALUATE)),
    (_CHAIN_PARITY, (*_STEPS, _PARITY, _SERVING)),
    (_SERVER, (*_STEPS, _TOKENIZERS, _SERVING, _LOAD, _LLM)),
    (_BENCHMARK, (*_STEPS, _BUDGET)),
    (
        "runtime/commands",
        (
            *(*_STEPS, _CLI, _SCORING, _SESSION, _PARITY, _REPORT, _ENGINES, _RANKS, _TOKENIZERS),
            *(_SERVING, _LOAD, _EVALUATE, _LLM, _CHAIN_PARITY, _SERVER, _BENCHMARK),
        ),
    ),
    ("runtime/__main__", (_CLI, "runtime/commands")),
)

COMPILERS = {"tensorrt", "tensorrt_rtx", "polygraphy"}
HEAVY = {"torch", "transformers", "onnxscript", "onnx_ir", "numba", "matplotlib"}


@functools.cache
def modules(folder: str) -> dict[str, ast.Module]:
    """Every module below a folder by its path from the root."""
    paths = sorted((ROOT / folder).rglob("*.py"))
    assert paths, folder
    return {str(p.relative_to(ROOT)): ast.parse(p.read_text("utf-8"), str(p)) for p in paths}


@functools.cache
def imported(tree: ast.AST) -> tuple[str, ...]:
    return tuple(_imported(tree))


def _imported(tree: ast.AST) -> Iterator[str]:
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


def room(module: str) -> str:
    """The first level below the package: `graphs/contract` for `graphs.contract.spec`."""
    return "/".join(module.split(".")[:2])


def dotted(path: str) -> str:
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def imported_modules(tree: ast.AST, known: set[str]) -> Iterator[str]:
    """The project's own modules that a file imports; `from a import b` may name the module a.b."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from (name if name in known else node.module for name in names)
    yield from imported(tree)


def arrows(trees: dict[str, ast.Module]) -> set[tuple[str, str]]:
    """Which room imports which other one."""
    known = {dotted(path) for path in trees}
    return {
        (room(dotted(path)), room(name))
        for path, tree in trees.items()
        for name in imported_modules(tree, known)
        if name in known and room(name) != room(dotted(path)) and name not in PACKAGES
    }


@functools.cache
def all_modules() -> dict[str, ast.Module]:
    return {path: tree for package in PACKAGES for path, tree in modules(package).items()}


def test_no_room_imports_what_the_directions_do_not_allow() -> None:
    allowed = dict(DIRECTIONS)
    wrong = {(a, b) for a, b in arrows(all_modules()) if a in allowed and b not in allowed[a]}
    assert not wrong


def test_an_arrow_shows_that_the_directions_do_not_allow() -> None:
    trees = {
        "graphs/ops/a.py": ast.parse("from graphs.engines import b"),
        "graphs/engines/b.py": ast.parse(""),
    }
    assert arrows(trees) == {("graphs/ops", "graphs/engines")}
    assert "graphs/engines" not in dict(DIRECTIONS)["graphs/ops"]


def test_every_room_has_its_directions() -> None:
    rooms = {room(dotted(path)) for path in all_modules()} - set(PACKAGES)
    planned = {"graphs/kernels", "runtime/ranks", "runtime/server"}
    assert set(dict(DIRECTIONS)) - planned <= rooms <= set(dict(DIRECTIONS))


def test_directions_have_no_cycle_and_export_and_runtime_never_meet() -> None:
    before: set[str] = set()
    for name, imports in DIRECTIONS:
        assert set(imports) <= before, f"{name} comes before {sorted(set(imports) - before)}"
        assert {other.split("/")[0] for other in imports} <= {name.split("/")[0], "graphs"}, name
        before.add(name)


def test_a_folder_has_at_most_12_modules_and_a_module_at_most_250_lines() -> None:
    tops = (*PACKAGES, "bench", "models")
    for top in (*tops, "tests"):
        for folder in (ROOT / top, *(p for p in (ROOT / top).rglob("*") if p.is_dir())):
            names = [p.name for p in folder.glob("*.py") if p.name != "__init__.py"]
            assert len(names) <= 12, f"{folder}: {len(names)} modules"
    lines = {
        p: len((ROOT / p).read_text("utf-8").splitlines()) for top in tops for p in modules(top)
    }
    assert not {path: count for path, count in lines.items() if count > 250}


def test_no_test_imports_another() -> None:
    """What several tests need is in tests/support."""
    names = {(path, name) for path, tree in modules("tests").items() for name in imported(tree)}
    assert not {
        (path, name)
        for path, name in names
        if name.startswith("tests.") and not name.startswith("tests.support")
    }


@pytest.mark.parametrize(
    ("folder", "forbidden"),
    [
        ("export", {"runtime", "tests"}),
        ("runtime", {"export", "tests"}),
        ("graphs", {"export", "runtime", "tests"}),
        ("models", {"runtime", "tests"}),
        ("bench", {"tests"}),
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
    compiling, writing = "graphs/engines/tensorrt.py", "graphs/parity/standalone.py"
    assert importers((*PACKAGES, "models"), COMPILERS) == {compiling, writing}
    assert importers((*PACKAGES, "models"), COMPILERS - {"polygraphy"}) <= {compiling}


def test_transformers_is_imported_by_tests_only() -> None:
    assert importers((*PACKAGES, "models"), {"transformers"}) == set()


def test_only_the_gpus_memory_imports_torch_in_the_runtime() -> None:
    gpu = {"runtime/devices/cuda.py", "runtime/devices/driver.py"}
    assert importers(("runtime",), {"torch"}) == gpu


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
    names = [dotted(path) for path in ("graphs/__main__.py", *modules("graphs/commands"))]
    assert modules_after("\n".join(f"import {name}" for name in names)) == []
