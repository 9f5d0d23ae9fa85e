"""A copy of the project in which tests run make: its builds are nobody else's."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from graphs.contract.spec import GRAPHS

ROOT = Path(__file__).parents[2]
FILES = ("Makefile", "pyproject.toml", "constraints.txt")
PACKAGES = ("export", "graphs", "runtime")
ENGINES = "rtx-sm120-b8t128c4096"

# Stands in for python where only make is tested: it notes each command and makes its outputs.
STUB = """#!/bin/bash
set -eu
shift # -m
echo "begin $*" >>commands
sleep "${STUB_SECONDS:-0}"
build=${*: -1}
case "$1 $2" in
"export graphs") mkdir -p "$build/onnx"
	touch "$build"/onnx/{dense,moe,experts,head}.onnx "$build/spec.json";;
"export record") test -e "$build/checkpoint.json" || echo >"$build/checkpoint.json";;
"graphs compile") folder=build/k2/fp8/rtx-$5-b8t128c4096; mkdir -p $folder
	touch $folder/{dense,moe,experts,head}.engine $folder/manifest.json;;
esac
echo "end $*" >>commands
"""


class MakeTree:
    """The Makefile and the packages in a folder of their own, with `python` or a stub for it."""

    def __init__(self, folder: Path, stub: bool = True) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        for name in FILES:
            shutil.copy(ROOT / name, folder)
        for name in PACKAGES:
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / name, folder / name, ignore=ignored)
        (folder / ".venv").mkdir()
        (folder / ".venv" / ".installed").touch()
        self.python = sys.executable
        if stub:
            self.python = "./stub"
            (folder / "stub").write_text(STUB)
            (folder / "stub").chmod(0o755)

    def command(self, *arguments: str) -> list[str]:
        return ["make", f"PYTHON={self.python}", *arguments]

    def environment(self, **variables: str) -> dict[str, str]:
        """This process's, without what a make that runs the tests has put into it."""
        inherited = {
            name: value
            for name, value in os.environ.items()
            if name != "KIMI_TRT_LOCK" and not name.startswith(("MAKE", "MFLAGS"))
        }
        return inherited | {"OMP_NUM_THREADS": "1"} | variables

    def run(self, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.command(*arguments),
            cwd=self.folder,
            env=self.environment(**variables),
            capture_output=True,
            text=True,
            errors="replace",
            timeout=600,
        )

    def start(self, *arguments: str, **variables: str) -> "subprocess.Popen[str]":
        """In a process group of its own, with all output in one pipe."""
        return subprocess.Popen(
            self.command(*arguments),
            cwd=self.folder,
            env=self.environment(**variables),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def commands(self) -> list[str]:
        """What the stub noted, in order."""
        path = self.folder / "commands"
        return path.read_text().splitlines() if path.exists() else []

    def make_checkpoint(self, path: str = "models/tiny") -> None:
        """The one file of a checkpoint that make itself reads."""
        (self.folder / path).mkdir(parents=True)
        (self.folder / path / "config.json").write_text("{}")

    def pretend_built(self, build: str = "build/tiny/fp8") -> None:
        """All that `make engines` makes, each file younger than what it is made from."""
        graphs = [f"onnx/{graph}.onnx" for graph in GRAPHS]
        engines = [f"{ENGINES}/{name}" for name in (".engines", *(f"{g}.engine" for g in GRAPHS))]
        names = [".config", ".exported", *graphs, "spec.json", "checkpoint.json", ".weights"]
        names += [".golden", "parity/graphs.json", "parity/chain.json", ".parity", *engines]
        for path in self.folder.rglob("*"):
            os.utime(path, (1e9, 1e9))
        for age, name in enumerate([*names, f"{ENGINES}/manifest.json"], 1):
            path = self.folder / build / name
            path.parent.mkdir(parents=True, exist_ok=True)
            if not path.exists():
                path.write_text("{}" if name == ".config" else "")
            os.utime(path, (1e9 + age, 1e9 + age))

    def variable(self, name: str) -> list[str]:
        """The words of one of the Makefile's variables."""
        done = self.run(
            f"--eval=print: ; @echo $({name})", "print", "PRESET=k2", KIMI_TRT_LOCK="held"
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.split()


def stages(output: str) -> set[str]:
    """The commands of the packages in make's output: `export graphs`, `runtime parity`."""
    return set(re.findall(r"-m ((?:export|graphs|runtime) \w+)", output))
