"""How long the engines of a preset take from a cold start, for two targets, and where that goes.

    python -m bench.host.compile_time

It runs `make engines PRESET=k2 TARGET=…` for a folder of its own in build/, so nothing is exported
or compiled yet; what is installed is, and lies in the page cache. Every Python process that runs
meanwhile says how long it was at what (startup_probe/sitecustomize.py). Engines are built two at a
time, each in a process of its own, so the processes' seconds are more than those on the clock; the
rest of `graphs compile` is waiting for them.
"""

import json
import os
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from graphs.cli import make_app, run, wide_console
from graphs.contract.spec import BuildError
from runtime.benchmark.measurements import BenchReport, Measurement

ROOT = Path(__file__).parents[2]
PROBE = Path(__file__).parent / "startup_probe"
TARGETS = ("sm120", "sm89")
LIMIT = 60.0  # seconds for both targets
PACKAGES = ("torch", "onnxscript", "tensorrt-rtx", "polygraphy")
BEFORE = ("start-up", "imports")  # what a process does before it does anything
PHASES = (*BEFORE, "export", "lint", "parse", "build", "rest")

app = make_app("Engines of a preset from a cold start, and where the time goes.")


@dataclass(frozen=True)
class Make:
    """One `make engines`: seconds on the clock, and by kind of process those of each phase."""

    target: str
    seconds: float
    processes: Mapping[str, Counter[str]]


def make_engines(preset: str, target: str, folder: Path) -> Make:
    """Into build/`folder`. Raises BuildError where make fails."""
    told = ROOT / "build" / folder / f"phases-{target}.jsonl"
    told.parent.mkdir(parents=True, exist_ok=True)
    environment = {k: v for k, v in os.environ.items() if not k.startswith("MAKE")}
    environment |= {"PYTHONPATH": str(PROBE), "PHASES_FILE": str(told)}
    command = ["make", "engines", f"PRESET={preset}", f"TARGET={target}", f"NAME={folder}"]
    start = time.perf_counter()
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    seconds = time.perf_counter() - start
    if done.returncode:
        raise BuildError(f"{' '.join(command)}: {done.stderr[-2000:]}")
    return Make(target, seconds, read_phases(told))


def read_phases(told: Path) -> dict[str, Counter[str]]:
    """What the processes said, those of a kind added up."""
    found: dict[str, Counter[str]] = {}
    for line in told.read_text(encoding="utf-8").splitlines():
        one = json.loads(line)
        words = one["argv"]
        if "resource_tracker" in words[-1]:  # multiprocessing's own, which waits for the others
            continue
        kind = " ".join(words[2:4]) if words[1] == "-m" else "building an engine"
        found.setdefault(kind, Counter()).update(one["seconds"])
        found[kind]["processes"] += 1
    return found


def table(preset: str, makes: list[Make]) -> Table:
    total = sum(make.seconds for make in makes)
    shown = Table(title=f"engines of {preset} from a cold start: {total:.1f} s")
    for column in ("target", "processes", "", "on the clock", *PHASES):
        shown.add_column(column, justify="left" if column in ("target", "") else "right")
    for make in makes:
        shown.add_row(make.target, "", "make engines", f"{make.seconds:.1f}")
        for kind, seconds in make.processes.items():
            count, figures = str(seconds["processes"]), [f"{seconds[p]:.1f}" for p in PHASES]
            shown.add_row("", count, kind, "", *figures)
    return shown


def share_before(makes: list[Make]) -> float:
    """That of start-up and imports in all processes' time, but for what `graphs compile` waits."""
    counters = [seconds for make in makes for seconds in make.processes.values()]
    waiting = sum(make.processes["graphs compile"]["rest"] for make in makes)
    before, everything = (sum(c[p] for c in counters for p in part) for part in (BEFORE, PHASES))
    return before / (everything - waiting)


@app.command()
def main(
    preset: Annotated[str, typer.Option(help="Name of a config that comes along.")] = "k2",
    rounds: Annotated[int, typer.Option(min=1, help="Cold starts; the table is the last's.")] = 1,
    out: Annotated[Path, typer.Option(help="The JSON to write.")] = Path(
        "build/bench/compile.json"
    ),
) -> None:
    """Measure it, for sm120 and then for sm89, which finds the graphs exported."""
    folder, found = Path("bench") / f"compile-time-{preset}", list[list[Make]]()
    for _ in range(rounds):
        shutil.rmtree(ROOT / "build" / folder, ignore_errors=True)
        found.append([make_engines(preset, target, folder) for target in TARGETS])
    shutil.rmtree(ROOT / "build" / folder)
    measurements = [
        Measurement("make engines", one.target, {}, tuple(turn[i].seconds for turn in found))
        for i, one in enumerate(found[0])
    ]
    whole = tuple(sum(make.seconds for make in turn) for turn in found)
    measurements.append(Measurement("make engines", " and ".join(TARGETS), {}, whole))
    last = {f"{m.target}: {kind}": dict(s) for m in found[-1] for kind, s in m.processes.items()}
    share = share_before(found[-1])
    machine, versions = {"cores": os.cpu_count()}, {name: version(name) for name in PACKAGES}
    BenchReport(machine, versions, measurements, {"phases": last, "before": share}).save(out)
    wide_console().print(table(preset, found[-1]))
    print(f"start-up and imports: {share:.0%} of all processes' time, waiting apart")
    if measurements[-1].median > LIMIT:
        print(f"more than {LIMIT:.0f} s", file=sys.stderr)
        raise typer.Exit(1)


if __name__ == "__main__":
    run(app)
