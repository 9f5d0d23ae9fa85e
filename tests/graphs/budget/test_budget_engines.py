"""Built engines held against their budgets: real ones, one that copies a weight, doctored ones."""

import dataclasses
import json
import shutil
from pathlib import Path

import onnx
import pytest
from typer.testing import CliRunner

from graphs.__main__ import app
from graphs.budget.engines import CONSTANTS, Built, built_engines
from graphs.contract.manifest import ENGINE_MODES, EngineRecord, Manifest
from graphs.contract.spec import GRAPHS, BuildError, BuildSpec
from graphs.engines.activation_budget import activation_budget
from graphs.engines.compile import compile_build
from tests.support.graph_surgery import read_in_3d, replace_graph
from tests.support.helpers import tiny_config
from tests.support.shared_builds import export_once

pytestmark = pytest.mark.slow  # compiles engines

WIDE = 32768  # makes mlp.down's matrix 33.6 MB, more than a budget has to spare


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The manifest of a small model's engines."""
    build = tmp_path_factory.mktemp("budget") / "build" / "wide" / "fp8"
    raw = tiny_config(hidden_size=1024, intermediate_size=WIDE, vocab_size=512)
    export_once(raw | {"bos_token_id": 1, "eos_token_id": 2}, "fp8", build)
    return build / compile_build(build, "sm120").folder / "manifest.json"


@pytest.fixture
def manifest(compiled: Path, tmp_path: Path) -> Path:
    """A copy, to be changed."""
    build = tmp_path / "build" / "wide" / "fp8"
    shutil.copytree(compiled.parents[1], build)
    return build / compiled.parent.name / "manifest.json"


def too_much(manifest: Path) -> list[Built]:
    return [figure for figure in built_engines(manifest) if figure.too_much]


def doctor(manifest: Path, **changes: object) -> None:
    """Replace figures of the dense engine's record."""
    content = Manifest.load(manifest.parent)
    record = dataclasses.replace(content.engines["dense"], **changes)  # type: ignore[arg-type]
    dataclasses.replace(content, engines=content.engines | {"dense": record}).save(manifest.parent)


def dense(manifest: Path) -> EngineRecord:
    return Manifest.load(manifest.parent).engines["dense"]


def test_engines_keep_their_budgets(compiled: Path) -> None:
    figures = built_engines(compiled)
    assert [(f.graph, f.mode) for f in figures] == [
        (graph, mode) for graph in GRAPHS for mode in (*ENGINE_MODES, None)
    ]
    for figure in figures:
        assert figure.logged is not None and not figure.too_much, figure
        assert figure.mode is None or figure.logged > 0.4 * figure.expected, figure


def test_a_copied_weight_fails(manifest: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One linear layer reads [1, tokens, in] in place of [tokens, in], where no rule refuses it."""
    build = manifest.parents[1]
    model = onnx.load(build / "onnx/dense.onnx")
    read_in_3d(model, "mlp.down.weight")
    replace_graph(build, "dense", model.SerializeToString())
    monkeypatch.setattr("graphs.engines.compile.lint_model", lambda *_: [])
    compile_build(build, "sm120", graphs=["dense"])
    over = too_much(manifest)
    assert ("dense", "decode") in [(figure.graph, figure.mode) for figure in over]
    assert {figure.graph for figure in over} == {"dense"}
    result = CliRunner().invoke(app, ["budget", "--engines", str(manifest)])
    assert result.exit_code == 1
    assert f"error: {over[0]}" in result.stdout
    text = str(over[0])
    assert (
        text.startswith("wide fp8, sm120, dense: ")
        and "bytes of scratch in decode and 10% more, got " in text
    )


def test_the_limit_is_the_budget_computed_anew(manifest: Path) -> None:
    """Whatever the manifest says that the budget was."""
    budget = activation_budget(
        BuildSpec.load(manifest.parents[1]),
        "dense",
        "decode",
        Manifest.load(manifest.parent).profile,
    )
    usual = dense(manifest).activation_bytes
    lenient = {mode: 10**12 for mode in ENGINE_MODES}
    doctor(manifest, activation_bytes=usual | {"decode": budget}, budget_bytes=lenient)
    assert too_much(manifest) == []
    doctor(manifest, activation_bytes=usual | {"decode": budget + 1})
    (over,) = too_much(manifest)
    assert (over.graph, over.mode) == ("dense", "decode")


def test_weights_inside_an_engine_fail(manifest: Path) -> None:
    doctor(manifest, weight_bytes=dense(manifest).weight_bytes)
    assert too_much(manifest) == []
    doctor(manifest, weight_bytes=WIDE * 1024)
    (over,) = too_much(manifest)
    assert (over.mode, over.expected) == (None, CONSTANTS)
    assert "bytes of constants" in str(over)


def test_a_figure_that_the_builder_did_not_log_is_shown_as_such(manifest: Path) -> None:
    doctor(manifest, weight_bytes=None)
    assert too_much(manifest) == []
    result = CliRunner().invoke(app, ["budget", "--engines", str(manifest), "--json"])
    assert result.exit_code == 0
    engines = json.loads(result.stdout)["engines"]
    (constants,) = [e for e in engines if e["graph"] == "dense" and e["mode"] is None]
    assert (constants["logged"], constants["too_much"]) == (None, False)


def test_an_engine_folder_without_its_build_is_refused(manifest: Path) -> None:
    (manifest.parents[1] / "spec.json").unlink()
    with pytest.raises(BuildError, match=r"no spec\.json; export again"):
        built_engines(manifest)


def test_no_engine_is_an_error() -> None:
    result = CliRunner().invoke(app, ["budget", "--engines"])
    assert isinstance(result.exception, BuildError)
    assert str(result.exception).startswith("no engine in any manifest; make them with")
