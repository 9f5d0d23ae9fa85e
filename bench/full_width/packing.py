"""Packing against `cp`: speed, memory, and resumption after a kill at a random moment.

    python -m bench.full_width.packing build/full-size/checkpoint build/full-size/fp8

The checkpoint's shards are copied with `cp --sparse=never` and packed in turn, so that both meet
the same machine; the ratio is taken pair by pair. Before each, the shards are dropped from the page
cache: both read them from the disk, as they would a checkpoint larger than memory. Then packing is
killed with SIGKILL at random moments and run again, and every file has to come out with the bytes
of the undisturbed run. Needs the build's graphs to be exported, and disk for the packed weights or
for the checkpoint once more.
"""

import os
import random
import resource
import shutil
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from export.packing.staging import STAGING
from graphs.contract.spec import BuildSpec
from graphs.contract.tensorfile import CHECKSUMS, TensorFile


def main(
    checkpoint: Annotated[Path, typer.Argument(help="Folder with config.json and shards.")],
    build: Annotated[Path, typer.Argument(help="Build folder with the exported graphs.")],
    runs: Annotated[int, typer.Option(min=1, help="Pairs of cp and packing.")] = 3,
    kills: Annotated[int, typer.Option(min=0, help="Runs that are killed and resumed.")] = 3,
    seed: Annotated[int, typer.Option(help="Seed of the moments at which runs are killed.")] = 0,
) -> None:
    """Time packing against cp, and resume it after kills."""
    shards = sorted(checkpoint.glob("*.safetensors"))
    read = sum(shard.stat().st_size for shard in shards)
    copy = build / "copy"
    ratios, seconds = [], []
    for _ in range(runs):
        _forget(build)  # before the copy, so that the disk never holds both
        _drop_cache(shards)
        copied = _timed(["cp", "--sparse=never", *map(str, shards), str(_empty(copy))])
        shutil.rmtree(copy)
        _drop_cache(shards)
        seconds.append(_timed(_command(checkpoint, build)))
        ratios.append(copied / seconds[-1])
        print(
            f"cp {copied:.1f} s, {read / copied / 1e6:.0f} MB/s; packing {seconds[-1]:.1f} s, "
            f"{read / seconds[-1] / 1e6:.0f} MB/s; ratio {ratios[-1]:.2f}",
            flush=True,
        )
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
    print(
        f"{read / 1e9:.2f} GB: {statistics.median(ratios):.2f} of cp's speed (median of {runs}), "
        f"ru_maxrss {peak / 1e9:.2f} GB"
    )
    expected = _checksums(build)
    chance = random.Random(seed)
    for _ in range(kills):
        _forget(build)
        moment = chance.uniform(0.05, 0.95) * statistics.median(seconds)
        finished = _killed(_command(checkpoint, build), moment, build)
        subprocess.run(_command(checkpoint, build), check=True, stdout=subprocess.DEVNULL)
        for name in BuildSpec.load(build).weight_files:
            TensorFile.open(build / name).verify()
        same = _checksums(build) == expected
        print(
            f"killed after {moment:.1f} s with {finished} files finished, run again: "
            f"{'the same checksums' if same else 'OTHER CHECKSUMS'}",
            flush=True,
        )
        if not same:
            raise typer.Exit(1)


def _command(checkpoint: Path, build: Path) -> list[str]:
    arguments = ["--checkpoint", str(checkpoint), "--out", str(build)]
    return [sys.executable, "-m", "export", "weights", *arguments]


def _timed(command: list[str]) -> float:
    start = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - start


def _killed(command: list[str], moment: float, build: Path) -> int:
    """Kill the command after `moment` seconds; returns how many files it had finished."""
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    time.sleep(moment)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    return len(list((build / STAGING).rglob("*.safetensors")))


def _drop_cache(files: list[Path]) -> None:
    os.sync()
    for file in files:
        with file.open("rb") as opened:
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _empty(folder: Path) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder


def _forget(build: Path) -> None:
    """Remove packed and staged weights."""
    for folder in ("weights", STAGING):
        shutil.rmtree(build / folder, ignore_errors=True)


def _checksums(build: Path) -> dict[str, str]:
    names = BuildSpec.load(build).weight_files
    return {name: TensorFile.open(build / name).metadata[CHECKSUMS] for name in names}


if __name__ == "__main__":
    typer.run(main)
