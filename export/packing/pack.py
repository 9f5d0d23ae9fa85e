"""Checkpoint → packed weights: one file per layer, in the very layout that the engines read.

A checkpoint may be a terabyte, so nothing grows with it. A file is made module by module (a fused
matrix with its scales; the embedding in pieces), each by a worker that reads its sources, turns
them, and writes them to their place in the file; a worker holds one module at a time. Workers are
threads: reading, converting, hashing and writing all release the interpreter.

Files are made in a folder beside the build's own and moved in when all are whole, so a build never
mixes two checkpoints, and a checkpoint that turns out bad midway leaves the build as it was. What
was finished before a kill is not made again: a stamp beside each file has the hash of what it was
made from (the identity and times of its shards, the tensors' places, the layout, this format).
"""

import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, as_completed, wait
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.filesize import decimal

from export.checkpoint.open import Checkpoint
from export.packing.packed_file import PackedFile, Task, packed_files
from export.packing.record import require_same, write_record
from export.packing.staging import STAGING, copy_tokenizer, locked, move_in
from graphs.contract.quantization import Int4Groups
from graphs.contract.spec import BuildError, BuildSpec, config_hash
from graphs.contract.tensorfile import TensorWriter

PackingProgress = Callable[[str, int, int], None]  # file's name, bytes written, bytes in all


@dataclass(frozen=True)
class PackingPlan:
    """All files of a build, and those still to be made."""

    spec: BuildSpec
    files: tuple[PackedFile, ...]
    todo: tuple[PackedFile, ...]

    @classmethod
    def from_checkpoint(cls, checkpoint: Checkpoint, build: Path) -> "PackingPlan":
        """Raises BuildError where the build is another checkpoint's, or the disk is too small."""
        spec = matching_spec(checkpoint, build)
        files = tuple(packed_files(checkpoint, spec))
        folders = (build / STAGING, build)
        todo = tuple(f for f in files if not any(f.finished(folder) for folder in folders))
        needed, free = sum(file.bytes for file in todo), shutil.disk_usage(build).free
        if needed > free:
            raise BuildError(
                f"{build}: expected {decimal(needed)} of free disk for {len(todo)} files, got "
                f"{decimal(free)}; free some, or choose another --out"
            )
        return cls(spec, files, todo)

    def summary(self) -> str:
        """Sizes before and after, and what is finished already."""
        before = sum(s.bytes for s in {s for file in self.files for s in file.sources})
        after = sum(file.bytes for file in self.files)
        text = f"{decimal(before)} of checkpoint, {decimal(after)} packed for {self.spec.precision}"
        if isinstance(self.spec.config.quantization, Int4Groups) and self.spec.precision == "fp8":
            text += (
                "; INT4 experts take twice the bytes as FP8, since engines that read their weights "
                "as inputs would expand INT4 to 16 bits at every run"
            )
        if done := len(self.files) - len(self.todo):
            text += f"; {done} of {len(self.files)} files are finished already"
        return text


def pack(
    checkpoint: Checkpoint,
    build: Path,
    workers: int | None = None,
    progress: PackingProgress = lambda file, done, total: None,
    started: Callable[[PackingPlan], None] = lambda plan: None,
) -> list[Path]:
    """Write weights, rope tables, tokenizer and generation config; returns the build's files.

    `workers`: threads, by default two more than cores, since some wait for the disk. Raises
    BuildError (see PackingPlan, and where another process packs into this build), CheckpointError
    where the checkpoint cannot be used; the build is as it was then, but for finished files in its
    `.packing` folder.
    """
    with locked(build):
        plan = PackingPlan.from_checkpoint(checkpoint, build)
        started(plan)
        staging = build / STAGING
        (staging / "weights").mkdir(parents=True, exist_ok=True)
        for cut_short in staging.rglob("*.tmp"):  # by a process that was killed
            cut_short.unlink()
        for file in plan.files:
            if not file.finished(staging):  # of another checkpoint, or cut short
                (staging / file.path).unlink(missing_ok=True)
        _make_files(plan, staging, workers or (os.cpu_count() or 1) + 2, progress)
        copied = copy_tokenizer(checkpoint.folder, staging)
        move_in(staging, build, plan.files)
        write_record(build, checkpoint.folder, checkpoint.identity)
    return [build / file for file in (*(f.path for f in plan.files), *copied)]


def matching_spec(checkpoint: Checkpoint, build: Path) -> BuildSpec:
    """The build's spec; raises BuildError where the build is another config's or checkpoint's."""
    spec = BuildSpec.load(build)
    if spec.config_sha256 != config_hash(checkpoint.raw_config):
        raise BuildError(
            f"{build}: exported from another config (hash {spec.config_sha256[:12]}…) than "
            f"{checkpoint.folder} has ({config_hash(checkpoint.raw_config)[:12]}…); choose another "
            "--out, or export the graphs again"
        )
    require_same(build, checkpoint.folder, checkpoint.identity)
    return spec


def _make_files(plan: PackingPlan, folder: Path, workers: int, progress: PackingProgress) -> None:
    done, total = 0, sum(file.bytes for file in plan.todo)
    threads = torch.get_num_threads()
    try:
        with ThreadPoolExecutor(workers, "pack", torch.set_num_threads, (1,)) as pool:
            for file in plan.todo:
                with TensorWriter(folder / file.path, file.shapes, file.metadata) as writer:
                    for size in _run(pool, file.tasks, writer):
                        done += size
                        progress(file.path, done, total)
                file.stamp(folder).write_text(file.source_hash, encoding="utf-8")
    finally:
        torch.set_num_threads(threads)


def _run(pool: ThreadPoolExecutor, tasks: Iterable[Task], writer: TensorWriter) -> Iterator[int]:
    """The bytes of each task as it is done; the first failure keeps the others from starting."""

    def work(task: Task) -> int:
        return sum(writer.write(name, pieces) for name, pieces in task().items())

    futures: list[Future[int]] = [pool.submit(work, task) for task in tasks]
    try:
        for future in as_completed(futures):
            yield future.result()
    finally:
        for future in futures:
            future.cancel()
        wait(futures)
