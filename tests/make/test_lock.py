"""One make at a time writes to build/: the others wait, and say for whom."""

import fcntl
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.make_tree import MakeTree

HOLDER = """
import fcntl, sys, time
lock = open(sys.argv[1], "a")
fcntl.flock(lock, fcntl.LOCK_EX)
lock.truncate(0)
print("process 1 (make engines)", file=lock, flush=True)
print("held", flush=True)
time.sleep(600)
"""


@pytest.fixture
def tree(tmp_path: Path) -> MakeTree:
    (tmp_path / "build").mkdir()
    return MakeTree(tmp_path)


@pytest.fixture
def holder(tree: MakeTree) -> "subprocess.Popen[str]":
    """A process that holds the lock and sleeps."""
    command = [sys.executable, "-c", HOLDER, str(tree.folder / "build" / ".lock")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "held\n"
    return process


def free(tree: MakeTree) -> bool:
    with (tree.folder / "build" / ".lock").open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True


@pytest.mark.parametrize("target", ["graphs", "engines"])
def test_of_two_makes_at_once_the_second_waits_and_finds_all_done(
    tree: MakeTree, target: str
) -> None:
    arguments = (target, "PRESET=k2", "TARGET=sm120")
    first = tree.start(*arguments, STUB_SECONDS="3")
    while not tree.commands():
        time.sleep(0.02)
    second = tree.start(*arguments)
    outputs = [process.communicate(timeout=60)[0] for process in (first, second)]
    assert [first.returncode, second.returncode] == [0, 0], outputs
    assert "waiting" not in outputs[0]
    expected = rf"^waiting for process \d+ \(make {target}\), which writes to build/$"
    assert re.search(expected, outputs[1], re.M), outputs[1]
    commands = tree.commands()
    assert len(commands) == (2 if target == "graphs" else 4)
    for begin, end in zip(commands[::2], commands[1::2], strict=True):
        assert begin.replace("begin", "end") == end


def test_a_killed_holder_frees_the_lock(tree: MakeTree, holder: "subprocess.Popen[str]") -> None:
    waiting = tree.start("graphs", "PRESET=k2")
    assert waiting.stdout is not None
    expected = "waiting for process 1 (make engines), which writes to build/\n"
    assert waiting.stdout.readline() == expected
    assert not tree.commands()
    holder.kill()
    holder.wait()
    waiting.communicate(timeout=60)
    assert waiting.returncode == 0 and len(tree.commands()) == 2


def test_the_lock_is_held_as_long_as_anything_could_still_write(tree: MakeTree) -> None:
    """make is killed, its recipe runs on."""
    process = tree.start("graphs", "PRESET=k2", STUB_SECONDS="600")
    while not tree.commands():
        time.sleep(0.02)
    process.kill()
    process.wait()
    assert not free(tree)
    os.killpg(process.pid, signal.SIGKILL)
    for _ in range(100):
        if free(tree):
            break
        time.sleep(0.05)
    assert free(tree)


def test_what_only_reads_takes_no_lock(tree: MakeTree, holder: "subprocess.Popen[str]") -> None:
    ruff = tree.folder / ".venv" / "bin"
    ruff.mkdir()
    for name in ("ruff", "mypy"):
        (ruff / name).write_text("#!/bin/sh\n")
        (ruff / name).chmod(0o755)
    for arguments in (["help"], ["lint"], ["test"], ["check"], ["-n", "graphs", "PRESET=k2"]):
        done = tree.run(*arguments)
        assert done.returncode == 0 and "waiting" not in done.stdout + done.stderr
    assert not free(tree)
    holder.kill()
    holder.wait()


def test_makes_within_make_do_not_wait_for_it(tree: MakeTree) -> None:
    """`presets` runs a make for each preset and target, and a deleted engine another one."""
    for _ in range(2):
        done = tree.run("presets", "PRESETS=k2")
        assert done.returncode == 0 and "waiting" not in done.stderr, done.stderr
        engine = tree.folder / "build" / "k2" / "fp8" / "rtx-sm89-b8t128c4096" / "moe.engine"
        engine.unlink()
    assert tree.run("engines", "PRESET=k2", "TARGET=sm89").returncode == 0 and engine.is_file()
    assert free(tree)


def test_clean_leaves_the_lock_to_those_who_wait_for_it(tree: MakeTree) -> None:
    assert tree.run("graphs", "PRESET=k2").returncode == 0
    lock = (tree.folder / "build" / ".lock").stat().st_ino
    assert tree.run("clean").returncode == 0
    assert [path.name for path in (tree.folder / "build").iterdir()] == [".lock"]
    assert (tree.folder / "build" / ".lock").stat().st_ino == lock


def test_a_machine_without_flock_is_told_what_to_install(tree: MakeTree) -> None:
    tools = tree.folder / "tools"
    tools.mkdir()
    for name in ("make", "mkdir", "bash"):
        path = next(p for f in os.environ["PATH"].split(":") if (p := Path(f) / name).exists())
        (tools / name).symlink_to(path)
    done = tree.run("graphs", "PRESET=k2", PATH=str(tools))
    assert done.returncode == 2
    assert done.stderr.splitlines()[0] == "flock: not found; install util-linux"
