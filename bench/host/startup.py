"""From nothing to the first token of k2-nano: imports, loading, and the prompt's step, each apart.

    python -m bench.host.startup build/k2-nano/fp32 build/k2-nano/fp8

Every round of a build is a process of its own, the builds in turns. What they read lies in the page
cache.
"""

import json
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from graphs.cli import make_app, run, wide_console
from graphs.contract.spec import BuildError
from runtime.benchmark.measurements import BenchReport, Measurement

PROMPT = "And it came to pass"
LIMIT = 2.0  # seconds to load k2-nano and make the first token
PACKAGES = ("numpy", "onnx", "onnxruntime-gpu")
SCRIPT = """
import json, sys, time
times = [time.perf_counter()]
from runtime import LLM
times.append(time.perf_counter())
llm = LLM.load(sys.argv[1], threads=int(sys.argv[2]))
times.append(time.perf_counter())
next(llm.stream(sys.argv[3], max_new_tokens=1))
times.append(time.perf_counter())
print(json.dumps([end - start for start, end in zip(times, times[1:])]))
"""
PARTS = ("imports", "load", "first token")

app = make_app("Imports, loading and the first token, in fresh processes.")


def start(build: Path, threads: int) -> list[float]:
    """Seconds of each part. Raises BuildError where the process failed."""
    command = [sys.executable, "-c", SCRIPT, str(build), str(threads), PROMPT]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise BuildError(f"{build}: {done.stderr.strip()[-1000:]}")
    seconds: list[float] = json.loads(done.stdout)
    return seconds


def measure(builds: list[Path], rounds: int, threads: int) -> list[Measurement]:
    found: dict[Path, list[list[float]]] = {build: [] for build in builds}
    for _ in range(rounds):
        for build, rows in found.items():
            rows.append(start(build, threads))
    return [
        Measurement(part, build.name, {"threads": threads}, tuple(row[i] for row in rows))
        for build, rows in found.items()
        for i, part in enumerate(PARTS)
    ]


def after_imports(measurements: list[Measurement], by: str) -> float:
    """Seconds until a build's first token, medians."""
    return sum(one.median for one in measurements if one.by == by and one.what != PARTS[0])


def table(measurements: list[Measurement]) -> Table:
    shown = Table(title="seconds, medians (middle halves)")
    for column in ("build", *PARTS, "load and first token"):
        shown.add_column(column, justify="left" if column == "build" else "right")
    for by in dict.fromkeys(one.by for one in measurements):
        rows = [one for one in measurements if one.by == by]
        cells = [f"{m.median:.2f} ({m.middle_half[0]:.2f}–{m.middle_half[1]:.2f})" for m in rows]
        shown.add_row(by, *cells, f"{after_imports(rows, by):.2f}")
    return shown


@app.command()
def main(
    builds: Annotated[list[Path], typer.Argument(help="Build folders of k2-nano.")],
    rounds: Annotated[int, typer.Option(min=1)] = 7,
    threads: Annotated[int, typer.Option(help="ONNX Runtime's; 0: one per core.")] = 2,
    out: Annotated[Path, typer.Option(help="The JSON to write.")] = Path(
        "build/bench/startup.json"
    ),
) -> None:
    """Measure it; exit status 1 where loading and the first token take more than 2 s."""
    found = measure(builds, rounds, threads)
    machine, versions = {"cores": os.cpu_count()}, {name: version(name) for name in PACKAGES}
    BenchReport(machine, versions, found).save(out)
    wide_console().print(table(found))
    if any(after_imports(found, one.by) > LIMIT for one in found):
        print(f"more than {LIMIT:.0f} s to load and make the first token", file=sys.stderr)
        raise typer.Exit(1)


if __name__ == "__main__":
    run(app)
