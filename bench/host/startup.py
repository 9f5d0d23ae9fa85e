"""Seconds from the start of a Python process to the first token of k2-nano.

    python -m bench.host.startup build/k2-nano/fp32 build/k2-nano/fp8

Every round of a build is a process of its own, the builds in turns. The page cache holds what they
read.
"""

import os
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

PROMPT = "And it came to pass"
LIMIT = 2.0  # seconds
PACKAGES = ("numpy", "onnx", "onnxruntime-gpu")
SCRIPT = """
import sys
from runtime import LLM
llm = LLM.load(sys.argv[1], threads=int(sys.argv[2]))
print(next(llm.stream(sys.argv[3], max_new_tokens=1)))
"""

app = make_app("Seconds from the start of a process to the first token.")


def first_token(build: Path, threads: int) -> float:
    """Seconds of one process, its end included. Raises BuildError where it failed."""
    command = [sys.executable, "-c", SCRIPT, str(build), str(threads), PROMPT]
    start = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    seconds = time.perf_counter() - start
    if done.returncode:
        raise BuildError(f"{build}: {done.stderr.strip()[-1000:]}")
    return seconds


def measure(builds: list[Path], rounds: int, threads: int) -> list[Measurement]:
    seconds: dict[Path, list[float]] = {build: [] for build in builds}
    for _ in range(rounds):
        for build, runs in seconds.items():
            runs.append(first_token(build, threads))
    return [
        Measurement("first token", build.name, {"threads": threads}, tuple(runs))
        for build, runs in seconds.items()
    ]


@app.command()
def main(
    builds: Annotated[list[Path], typer.Argument(help="Build folders of k2-nano.")],
    rounds: Annotated[int, typer.Option(min=1)] = 7,
    threads: Annotated[int, typer.Option(help="ONNX Runtime's; 0: one per core.")] = 2,
    out: Annotated[Path, typer.Option(help="The JSON to write.")] = Path(
        "build/bench/startup.json"
    ),
) -> None:
    """Measure it; exit status 1 where a build takes more than 2 s."""
    measurements = measure(builds, rounds, threads)
    machine, versions = {"cores": os.cpu_count()}, {name: version(name) for name in PACKAGES}
    BenchReport(machine, versions, measurements).save(out)
    for m in measurements:
        low, high = m.middle_half
        print(f"{m.by}: {m.median:.2f} s to the first token (middle half {low:.2f}–{high:.2f})")
    if any(m.median > LIMIT for m in measurements):
        print(f"expected at most {LIMIT:.0f} s to the first token", file=sys.stderr)
        raise typer.Exit(1)


if __name__ == "__main__":
    run(app)
