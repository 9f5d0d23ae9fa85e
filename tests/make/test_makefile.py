"""What make does with each target, variable and edited source; a stub stands in for python."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import pytest

from graphs.contract.manifest import Compiler
from graphs.contract.spec import PRECISIONS
from graphs.engines.targets import TARGETS
from tests.support.make_tree import PACKAGES, ROOT, MakeTree, stages


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> MakeTree:
    """A tree that looks built. Tests do not change it."""
    tree = MakeTree(tmp_path_factory.mktemp("make"))
    tree.make_checkpoint()
    tree.pretend_built()
    return tree


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("engines PRECISION=fp9", "PRECISION=fp9: expected one of: fp32 bf16 fp8"),
        ("graphs PRECISION=", "PRECISION=: expected one of: fp32 bf16 fp8"),
        ("engines PRESET=k3", r"PRESET=k3: expected one of: k2 k2-0905 .* deepseek-v2-lite"),
        ("engines TARGET=sm90", "TARGET=sm90: expected one of: auto sm75 sm80 .* sm121"),
        ("engines COMPILER=trt", "COMPILER=trt: expected one of: rtx tensorrt"),
        ("generate MODEL=models/tyni", "MODEL=models/tyni: expected a folder with a config.json, "),
        ("build/tyni/fp8/spec.json MODEL=models/tyni", "MODEL=models/tyni: .*: models/tiny"),
        ("weights PRESET=k2", "PRESET=k2: a preset has no weights; for make weights give MODEL="),
    ],
)
def test_a_misspelt_variable_is_one_line_with_the_choices(
    tree: MakeTree, arguments: str, message: str
) -> None:
    done = tree.run("MODEL=models/tiny", *arguments.split())
    assert done.returncode == 2 and done.stdout == ""
    assert re.fullmatch(rf"Makefile:\d+: \*\*\* {message}.*\.  Stop\.\n", done.stderr)
    assert not (tree.folder / "commands").exists()


def test_a_path_with_spaces_is_refused_in_one_line_that_says_why(tmp_path: Path) -> None:
    tree = MakeTree(tmp_path)
    tree.make_checkpoint("my models/ck")
    done = tree.run("generate", "MODEL=my models/ck")
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and not tree.commands()
    assert "without spaces, at which make splits" in done.stderr
    link = re.search(r"ln -s .*ck(?=\.  Stop)", done.stderr)
    assert link and link[0] == 'ln -s "my models/ck" ck'
    (tmp_path / "ck").symlink_to("my models/ck")
    assert tree.run("graphs", "MODEL=ck").returncode == 0


def test_a_project_in_a_path_with_spaces_builds(tmp_path: Path) -> None:
    tree = MakeTree(tmp_path / "a b" / "c d")
    tree.make_checkpoint()
    done = tree.run("graphs", "MODEL=models/tiny")
    assert done.returncode == 0, done.stderr
    assert (tree.folder / "build" / "tiny" / "fp8" / "spec.json").is_file()


def test_the_choices_are_those_of_the_sources(tree: MakeTree) -> None:
    assert tuple(tree.variable("PRECISIONS")) == PRECISIONS
    compilers = tree.variable("COMPILERS")
    assert tuple(compilers) == get_args(Compiler)
    for compiler in get_args(Compiler):
        assert tree.variable(f"TARGETS_{compiler}") == [f"sm{sm}" for sm in TARGETS[compiler]]


PARITY = {"graphs parity", "runtime parity", "graphs report"}
GOLDEN = {"export golden", *PARITY}
ALL = {"export graphs", "export weights", "graphs compile", *GOLDEN}


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("graphs/report/page.py", {"graphs report"}),
        ("graphs/report/page.css", {"graphs report"}),
        ("graphs/engines/table.py", set()),
        ("graphs/budget/tables.py", set()),
        ("runtime/benchmark/bench.py", set()),
        ("runtime/llm.py", set()),
        ("runtime/__main__.py", set()),
        ("export/synthetic/make.py", set()),
        ("runtime/step/chain.py", {"runtime parity", "graphs report"}),
        ("graphs/session.py", PARITY),
        ("graphs/parity/compare.py", PARITY),
        ("export/reference/attention.py", GOLDEN),
        ("export/golden/model.py", GOLDEN),
        ("export/checkpoint/block_fp8.py", GOLDEN),
        # In a dry run an export counts as one that changed every graph.
        ("graphs/ops/rope.py", ALL),
        ("graphs/passes/infer_shapes.py", ALL),
        ("graphs/contract/config.py", ALL),
        ("graphs/parity/taps.py", ALL),
        ("export/engine/blocks.py", ALL),
    ],
)
def test_an_edit_makes_anew_what_follows_from_it(
    tree: MakeTree, source: str, expected: set[str]
) -> None:
    assert (tree.folder / source).is_file()
    done = tree.run("-n", "-W", source, "engines", "MODEL=models/tiny", "TARGET=sm120")
    assert done.returncode == 0, done.stderr
    assert stages(done.stdout) == expected


def imported(path: Path) -> Iterator[str]:
    """Modules that a file imports, wherever the import stands."""
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        if isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def imported_sources(module: str) -> set[str]:
    """The project's files that a module imports, itself and theirs included."""
    files = {str(p.relative_to(ROOT)): p for name in PACKAGES for p in (ROOT / name).rglob("*.py")}
    modules = {name.removesuffix(".py").replace("/", "."): name for name in files}
    reached, waiting = set(), [module]
    while waiting:
        name = modules.get(waiting.pop())
        if name is not None and name not in reached:
            reached.add(name)
            waiting += imported(files[name])
    return reached


@pytest.mark.parametrize(
    ("variable", "modules"),
    [
        ("GRAPH_SOURCES", ["export.engine.to_onnx"]),
        ("GOLDEN_SOURCES", ["export.golden.model", "export.golden.layer"]),
        ("PARITY_SOURCES", ["graphs.parity.graphs"]),
        ("CHAIN_SOURCES", ["runtime.parity"]),
    ],
)
def test_the_lists_of_sources_hold_all_that_is_imported(
    tree: MakeTree, variable: str, modules: list[str]
) -> None:
    listed = set(tree.variable(variable))
    for module in modules:
        sources = imported_sources(module)
        assert len(sources) > 10 and sources <= listed, sorted(sources - listed)


def test_a_dry_run_changes_nothing(tmp_path: Path) -> None:
    tree = MakeTree(tmp_path)
    tree.make_checkpoint()
    done = tree.run("-n", "engines", "MODEL=models/tiny", "TARGET=sm120")
    assert done.returncode == 0 and stages(done.stdout) == ALL
    assert not (tmp_path / "build").exists() and not tree.commands()


def test_a_deleted_output_comes_back(tmp_path: Path) -> None:
    tree = MakeTree(tmp_path)
    for deleted in ("onnx/moe.onnx", "spec.json", ".config"):
        assert tree.run("graphs", "PRESET=k2").returncode == 0
        (tmp_path / "build" / "k2" / "fp8" / deleted).unlink()
        assert tree.run("graphs", "PRESET=k2").returncode == 0
        assert (tmp_path / "build" / "k2" / "fp8" / deleted).is_file()


def test_graphs_follow_the_config_and_not_its_time(tmp_path: Path) -> None:
    tree = MakeTree(tmp_path)
    tree.make_checkpoint()
    config = tmp_path / "models" / "tiny" / "config.json"
    counts = []
    for content in ("{}", "{}", '{"a": 1}'):
        config.write_text(content)
        assert tree.run("graphs", "MODEL=models/tiny").returncode == 0
        counts.append(sum("begin export graphs" in line for line in tree.commands()))
    assert counts == [1, 1, 2]


@pytest.mark.parametrize("version", ["3.10.12", "3.11.0"])
def test_an_older_python_is_one_clear_line(tmp_path: Path, version: str) -> None:
    tree = MakeTree(tmp_path)
    (tmp_path / ".venv" / ".installed").unlink()
    stub = tmp_path / ".venv" / "bin" / "python"
    stub.parent.mkdir()
    status = int(version.startswith("3.10"))
    stub.write_text(
        "#!/bin/sh\n"
        f'case "$1" in --version) echo Python {version};; -c) exit {status};;\n'
        '*) echo "$@" >>installed;; esac\n'
    )
    stub.chmod(0o755)
    done = tree.run("setup")
    if version == "3.11.0":
        assert done.returncode == 0 and (tmp_path / ".venv" / ".installed").is_file()
        expected = "--constraint constraints.txt --editable .[export,compile,dev]"
        assert expected in (tmp_path / "installed").read_text()
    else:
        assert done.returncode == 2 and not (tmp_path / "installed").exists()
        assert done.stderr.splitlines()[0] == (
            "expected Python 3.11 or newer, got Python 3.10.12; remove .venv, if there is one, and "
            "make it with a newer Python: python3.12 -m venv .venv"
        )
