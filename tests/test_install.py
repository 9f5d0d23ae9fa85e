"""The package as a user installs it: a wheel in an empty environment, run from another folder."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.support.builds import ROOT, Build

pytestmark = pytest.mark.slow

ABSENT = ("torch", "numba", "tensorrt_rtx", "polygraphy", "onnx_ir", "onnxscript", "pytest")


def call(*command: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
    line = list(map(str, command))
    return subprocess.run(line, capture_output=True, text=True, cwd=cwd, env=environment)


def checked(*command: str | Path, cwd: Path) -> str:
    done = call(*command, cwd=cwd)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy of the sources: setuptools leaves its own files where it builds."""
    folder = tmp_path_factory.mktemp("wheel")
    ignored = shutil.ignore_patterns(".*", "build", "__pycache__", "*.egg-info")
    shutil.copytree(ROOT, folder / "source", ignore=ignored)
    pip = (sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", folder)
    checked(*pip, folder / "source", cwd=folder)
    (path,) = folder.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The scripts' folder of an environment that holds the wheel and what it depends on."""
    folder = tmp_path_factory.mktemp("installed") / "venv"
    checked(sys.executable, "-m", "venv", folder, cwd=folder.parent)
    pip = (folder / "bin" / "python", "-m", "pip", "install", "--quiet")
    checked(*pip, "--constraint", ROOT / "constraints.txt", wheel, cwd=folder.parent)
    return folder / "bin"


@pytest.fixture(scope="module")
def build(nano: Build, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """k2-nano in fp8; the commands write what they find into it."""
    return Path(shutil.copytree(nano("fp8"), tmp_path_factory.mktemp("build") / "nano" / "fp8"))


def test_presets_page_and_type_markers_are_in_the_wheel(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    presets = {p.relative_to(ROOT).as_posix() for p in ROOT.glob("graphs/contract/presets/*.json")}
    assert len(presets) == 8 and presets <= names
    pages = {f"graphs/report/page.{suffix}" for suffix in ("css", "js")}
    assert pages | {f"{p}/py.typed" for p in ("export", "graphs", "runtime")} <= names
    assert not [n for n in names if n.split("/")[0] in ("tests", "bench", "models", "build")]


def test_the_base_install_holds_no_exporter_and_no_compiler(installed: Path) -> None:
    script = (
        "import importlib.util as u\n"
        f"print([name for name in {ABSENT} if u.find_spec(name) is not None])"
    )
    assert checked(installed / "python", "-c", script, cwd=installed).strip() == "[]"


def test_it_runs_a_build(installed: Path, build: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("In the beginning God created the heaven and the earth.")
    kimi = installed / "kimi-trt"
    generate = (kimi, "generate", build, "--prompt", "And it", "--max-new-tokens", "4", "--json")
    assert '"finish_reason": "length"' in checked(*generate, cwd=tmp_path)
    assert "bits per byte" in checked(kimi, "evaluate", build, "--text", text, cwd=tmp_path)
    checked(kimi, "parity", build, cwd=tmp_path)
    checked(kimi, "graphs", "parity", build, cwd=tmp_path)
    checked(kimi, "graphs", "report", build, "--out", tmp_path, cwd=tmp_path)
    page = (tmp_path / "report.html").read_text("utf-8")
    assert "<style>" in page and "<script>" in page
    assert "497,500,160" in checked(kimi, "graphs", "describe", "k2", cwd=tmp_path)
    checked(kimi, "graphs", "lint", build, cwd=tmp_path)


@pytest.mark.parametrize(
    ("command", "extra"),
    [
        (("export", "graphs", "--preset", "k2", "--precision", "fp8", "--out", "out"), "export"),
        (("graphs", "compile", "BUILD"), "compile"),
        (("graphs", "standalone", "BUILD", "head"), "export"),
        (("generate", "BUILD", "--prompt", "a", "--backend", "tensorrt"), "cuda"),
    ],
    ids=["export", "compile", "standalone", "tensorrt"],
)
def test_a_command_whose_packages_are_absent_names_the_extra(
    installed: Path, build: Path, tmp_path: Path, command: tuple[str, ...], extra: str
) -> None:
    arguments = [str(build) if word == "BUILD" else word for word in command]
    done = call(installed / "kimi-trt", *arguments, cwd=tmp_path)
    assert done.returncode == 1, done.stdout + done.stderr
    assert done.stderr.count("\n") == 1 and f"pip install '.[{extra}]'" in done.stderr, done.stderr
    assert not (tmp_path / "out").exists()


def test_the_command_says_its_version_and_commands(installed: Path, tmp_path: Path) -> None:
    from kimi_trt import __version__

    assert __version__ in checked(installed / "kimi-trt", "--version", cwd=tmp_path)
    shown = checked(installed / "kimi-trt", "--help", cwd=tmp_path)
    for name in ("generate", "evaluate", "parity", "bench", "graphs", "export"):
        assert f" {name} " in shown
