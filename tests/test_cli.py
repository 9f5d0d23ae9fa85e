"""The command lines of export and graphs: bad input is one line, exit status 1, and no file."""

import contextlib
import io
import json
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from graphs.contract.config import PRESETS
from tests.support.helpers import tiny_checkpoint, tiny_config
from tests.support.shared_builds import graphs_exported_once

ROOT = Path(__file__).parent.parent


Done = subprocess.CompletedProcess[str]


def run(package: str, *arguments: str | Path) -> Done:
    """`python -m package …` in this process."""
    line = [package, *map(str, arguments)]
    with (
        pytest.MonkeyPatch.context() as patch,
        contextlib.redirect_stdout(io.StringIO()) as out,
        contextlib.redirect_stderr(io.StringIO()) as err,
        pytest.raises(SystemExit) as end,
    ):
        patch.setattr(sys, "argv", line)
        patch.delitem(sys.modules, f"{package}.__main__", raising=False)
        runpy.run_module(package, run_name="__main__")
    assert end.value.code is None or isinstance(end.value.code, int)
    return Done(line, end.value.code or 0, out.getvalue(), err.getvalue())


def process(*arguments: str | Path) -> Done:
    command = [sys.executable, "-m", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT)


def assert_refused(done: Done, expected: str) -> None:
    assert done.returncode == 1, done.stderr
    assert "Traceback" not in done.stderr and done.stderr.count("\n") == 1, done.stderr
    assert re.search(expected, done.stderr), done.stderr


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("cli") / "checkpoint")


@pytest.fixture(scope="module")
def build(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A build folder with graphs only, made by the command line."""
    out = tmp_path_factory.mktemp("cli") / "fp8"
    arguments = ("--checkpoint", checkpoint, "--precision", "fp8", "--out", out)
    with graphs_exported_once():
        done = run("export", "graphs", *arguments)
    assert done.returncode == 0, done.stderr
    return out


def test_export_weights_and_golden_list_the_files_they_wrote(
    checkpoint: Path, build: Path, tmp_path: Path
) -> None:
    copy = tmp_path / "build"
    shutil.copytree(build, copy)
    for stage in ("weights", "golden"):
        done = run("export", stage, "--checkpoint", checkpoint, "--out", copy)
        assert done.returncode == 0, done.stderr
        files = [Path(line) for line in done.stdout.splitlines()]
        assert len(files) > 4 and all(f.is_file() for f in files)


def test_packing_says_sizes_rate_and_what_remains_where_there_is_no_terminal(
    checkpoint: Path, build: Path, tmp_path: Path
) -> None:
    copy = tmp_path / "build"
    shutil.copytree(build, copy)
    shutil.rmtree(copy / "weights", ignore_errors=True)
    arguments = ("export", "weights", "--checkpoint", checkpoint, "--out", copy)
    summary, *lines = run(*arguments).stderr.splitlines()
    assert re.fullmatch(r"[\d.]+ \w+ of checkpoint, [\d.]+ \w+ packed for fp8", summary)
    line = r"([\w/.]+): [\d.]+ \w+ of ([\d.]+ \w+), [\d.]+ \w+/s, \d+ s remain"
    matches = [re.fullmatch(line, text) for text in lines]
    assert all(matches) and matches[-1]
    assert matches[-1][1] == "rope.safetensors" and lines[-1].endswith(" 0 s remain")
    again = run(*arguments)
    assert f"{len(lines)} of {len(lines)} files are finished already" in again.stderr


@pytest.mark.parametrize(
    "change, expected",
    [
        ({"scoring_func": "softmax"}, "scoring_func: expected 'sigmoid' with .*, got 'softmax'"),
        ({"sliding_window": 4096}, "sliding_window: 4096 is not a known key"),
        ({"hidden_size": "160"}, "hidden_size: expected .*, got '160'"),
    ],
)
def test_a_refused_config_writes_nothing(
    tmp_path: Path, change: dict[str, object], expected: str
) -> None:
    config, out = tmp_path / "config.json", tmp_path / "out"
    config.write_text(json.dumps(tiny_config() | change))
    arguments = ("--checkpoint", config, "--precision", "fp8", "--out", out)
    assert_refused(run("export", "graphs", *arguments), expected)
    assert not out.exists()


def test_a_config_that_is_absent_or_not_json(tmp_path: Path) -> None:
    assert_refused(run("graphs", "describe", tmp_path / "no"), "no such preset .*k2")
    (tmp_path / "config.json").write_text("{")
    assert_refused(run("graphs", "describe", tmp_path), "not valid JSON")


@pytest.mark.parametrize("stage", ["weights", "golden"])
@pytest.mark.parametrize("damage", ["absent", "truncated", "misshapen"])
def test_a_bad_checkpoint_leaves_the_build_as_it_was(
    checkpoint: Path, build: Path, tmp_path: Path, stage: str, damage: str
) -> None:
    bad = tmp_path / "bad"
    if damage != "absent":
        shutil.copytree(checkpoint, bad)
    if damage == "truncated":
        shard = sorted(bad.glob("*.safetensors"))[-1]
        shard.write_bytes(shard.read_bytes()[:-1000])
    if damage == "misshapen":
        from safetensors.torch import load_file, save_file

        shard = sorted(bad.glob("*.safetensors"))[0]
        tensors = load_file(shard)
        name = next(n for n in tensors if n.endswith("_proj.weight"))
        tensors[name] = tensors[name][:-1].clone()
        save_file(tensors, shard)
    before = sorted(p for p in build.rglob("*"))
    done = run("export", stage, "--checkpoint", bad, "--out", build)
    expected = {
        "absent": "no such preset",
        "truncated": "not a complete safetensors file",
        "misshapen": r"expected shape \(.*\)",
    }
    assert_refused(done, expected[damage])
    assert sorted(p for p in build.rglob("*")) == before


@pytest.mark.parametrize(
    "arguments",
    [
        ("graphs", "describe", "absent"),
        pytest.param(("export", "golden", "--checkpoint", "absent"), marks=pytest.mark.slow),
    ],
)
def test_a_process_of_each_package_refuses_as_well(
    arguments: tuple[str, ...], tmp_path: Path
) -> None:
    out = ("--out", tmp_path) if arguments[0] == "export" else ()
    assert_refused(process(*arguments, *out), "absent")


def test_a_build_without_spec(tmp_path: Path, checkpoint: Path) -> None:
    for arguments in (
        ("graphs", "parity", tmp_path),
        ("graphs", "compile", tmp_path),
        ("export", "weights", "--checkpoint", checkpoint, "--out", tmp_path),
    ):
        assert_refused(run(*arguments), "no spec.json")


def test_fp8_below_sm89(build: Path) -> None:
    assert_refused(
        run("graphs", "compile", build, "--target", "sm86"),
        "target: expected sm89 or later for fp8, got sm86",
    )


def test_make_presets_builds_every_preset() -> None:
    presets = re.search(r"^PRESETS := (.*)$", (ROOT / "Makefile").read_text(), re.M)
    assert presets
    assert sorted(presets[1].split()) == sorted(p.stem for p in PRESETS.glob("*.json"))


def test_every_make_target_has_a_line_in_make_help() -> None:
    makefile = (ROOT / "Makefile").read_text()
    phony = re.search(r"^\.PHONY: (.*)$", makefile.replace("\\\n", " "), re.M)
    assert phony
    done = subprocess.run(
        ["make", "--no-print-directory", "help"], capture_output=True, text=True, cwd=ROOT
    )
    listed = {line.split()[0] for line in done.stdout.splitlines()}
    assert listed == set(phony[1].split())


def test_kimi_trt_has_the_runtimes_commands_and_the_other_packages_as_groups() -> None:
    import typer.core

    import export.__main__
    import graphs.__main__
    import kimi_trt
    import runtime.__main__

    def commands(app: typer.Typer) -> list[str]:
        group = typer.main.get_group(app)
        return group.list_commands(typer.Context(group))

    assert commands(kimi_trt.app) == [*commands(runtime.__main__.app), "graphs", "export"]
    group = typer.main.get_group(kimi_trt.app)
    for name, app in (("graphs", graphs.__main__.app), ("export", export.__main__.app)):
        command = group.get_command(typer.Context(group), name)
        assert isinstance(command, typer.core.TyperGroup)
        assert command.list_commands(typer.Context(command)) == commands(app)
