"""Seconds that `make engines` takes for a preset from a cold start, for two targets.

    python -m bench.host.compile_time

It runs `make engines PRESET=k2 TARGET=…` for a folder of its own in build/, so nothing is exported
or compiled yet; packages are installed, and the page cache holds them.
"""

import os
import shutil
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Annotated

import typer

from graphs.cli import make_app, run
from graphs.contract.spec import BuildError
from runtime.benchmark.measurements import BenchReport, Measurement

ROOT = Path(__file__).parents[2]
TARGETS = ("sm120", "sm89")
LIMIT = 60.0  # seconds for both targets
PACKAGES = ("torch", "onnxscript", "tensorrt-rtx", "polygraphy")

app = make_app("Seconds for the engines of a preset from a cold start.")


def make_engines(preset: str, target: str, folder: Path) -> float:
    """Seconds to fill build/`folder`. Raises BuildError where make fails."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("MAKE")}
    command = ["make", "engines", f"PRESET={preset}", f"TARGET={target}", f"NAME={folder}"]
    start = time.perf_counter()
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    seconds = time.perf_counter() - start
    if done.returncode:
        raise BuildError(f"{' '.join(command)}: {done.stderr[-2000:]}")
    return seconds


def measure(preset: str, rounds: int) -> list[Measurement]:
    """Seconds of each target in turn, the second one with the graphs exported, and of both."""
    folder = Path("bench") / f"compile-time-{preset}"
    turns = []
    for _ in range(rounds):
        shutil.rmtree(ROOT / "build" / folder, ignore_errors=True)
        turns.append([make_engines(preset, target, folder) for target in TARGETS])
    shutil.rmtree(ROOT / "build" / folder)
    columns = dict(zip(TARGETS, zip(*turns, strict=True), strict=True))
    columns[" and ".join(TARGETS)] = tuple(map(sum, turns))
    return [Measurement("make engines", by, {}, seconds) for by, seconds in columns.items()]


@app.command()
def main(
    preset: Annotated[str, typer.Option(help="Name of a config that comes along.")] = "k2",
    rounds: Annotated[int, typer.Option(min=1, help="Cold starts.")] = 1,
    out: Annotated[Path, typer.Option(help="The JSON to write.")] = Path(
        "build/bench/compile.json"
    ),
) -> None:
    """Measure it, for sm120 and then for sm89; exit status 1 where both take more than 60 s."""
    measurements = measure(preset, rounds)
    machine, versions = {"cores": os.cpu_count()}, {name: version(name) for name in PACKAGES}
    BenchReport(machine, versions, measurements).save(out)
    for m in measurements:
        print(f"engines of {preset} for {m.by}: {m.median:.1f} s")
    if measurements[-1].median > LIMIT:
        print(f"expected at most {LIMIT:.0f} s for {measurements[-1].by}", file=sys.stderr)
        raise typer.Exit(1)


if __name__ == "__main__":
    run(app)
