"""Which checkpoint a build is made of, in a file of its own; needs no torch.

    build/<model>/<precision>/checkpoint.json

A build has one checkpoint, whatever its folder is called. Where another one takes its place, what
followed from the first is no longer the build's: its head goes (without which no build is loaded;
layers that are still right are kept by packing), its goldens, and what parity found with them.
"""

import os
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path

from export.checkpoint.identity import CheckpointIdentity
from graphs.contract.json_records import write_json
from graphs.contract.spec import HEAD_FILE, BuildError, load_record

RECORD_FILE = "checkpoint.json"
RECORD_FORMAT = 1


@dataclass(frozen=True)
class BuildRecord:
    """The content of `checkpoint.json`; the path, as it was given, is for messages only."""

    format: int
    path: str
    fingerprint: str
    identity: CheckpointIdentity

    @classmethod
    def load(cls, build: Path) -> "BuildRecord | None":
        """None where the build has no record. Raises BuildError where it cannot be read."""
        path = build / RECORD_FILE
        if not path.exists():
            return None
        return load_record(cls, path, RECORD_FORMAT, "remove it and pack the weights again")


def require_same(build: Path, folder: Path, identity: CheckpointIdentity) -> None:
    """Raises BuildError where the build is recorded as another checkpoint's."""
    record = BuildRecord.load(build)
    if record is not None and record.fingerprint != identity.fingerprint:
        raise BuildError(
            f"{build}: expected the checkpoint that this build is made of, {record.path}, got "
            f"{folder}, which has {record.identity.difference(identity)}; choose another --out, or "
            "make it that checkpoint's build with "
            f"`python -m export record --checkpoint {folder} --out {build}`"
        )


def write_record(build: Path, folder: Path, identity: CheckpointIdentity) -> None:
    """Record the checkpoint; the file's time stays as it is where nothing has to be made anew."""
    record, path = _readable(build), build / RECORD_FILE
    if record is not None and record.identity == identity:
        return
    times = None
    if record is not None and _reasons(record.identity) == _reasons(identity):
        times = (path.stat().st_atime_ns, path.stat().st_mtime_ns)
    new = BuildRecord(RECORD_FORMAT, str(folder), identity.fingerprint, identity)
    write_json(path, asdict(new))
    if times is not None:
        os.utime(path, ns=times)


def _reasons(identity: CheckpointIdentity) -> tuple[str, list[int]]:
    """Any change of this is a reason to pack anew."""
    return identity.fingerprint, [shard.modified_ns for shard in identity.shards]


def record_checkpoint(folder: Path, build: Path) -> str | None:
    """Make a build this checkpoint's; returns in words what it was before, if that was another's.

    Raises ConfigError, CheckpointError.
    """
    record = _readable(build)
    known = () if record is None else record.identity.shards
    identity = CheckpointIdentity.from_folder(folder, known)
    build.mkdir(parents=True, exist_ok=True)
    replaced = None
    if record is not None and record.fingerprint != identity.fingerprint:
        (build / HEAD_FILE).unlink(missing_ok=True)
        for name in ("golden", "parity"):
            shutil.rmtree(build / name, ignore_errors=True)
        change = record.identity.difference(identity)
        replaced = f"{build}: {folder} replaces {record.path}: {change}"
    write_record(build, folder, identity)
    return replaced


def _readable(build: Path) -> BuildRecord | None:
    try:
        return BuildRecord.load(build)
    except BuildError:
        return None
