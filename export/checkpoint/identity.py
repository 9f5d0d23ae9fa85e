"""The identity of a checkpoint, taken without reading all of it; needs no torch.

Two fine-tunes agree in config and in the names and sizes of their files, so the first, middle and
last bytes of every tensor are hashed. Files that builds copy (tokenizer, generation config) are
hashed whole. Paths and times do not count: a folder that moved is the same checkpoint.

A shard that was sampled before is not read again while its inode and times stay the same: every
write to a file changes its ctime.
"""

import hashlib
import json
import os
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from export.checkpoint.errors import CheckpointError
from graphs.contract.config import load_raw_config
from graphs.contract.spec import BuildError, config_hash
from graphs.contract.tensorfile import read_header

INDEX = "model.safetensors.index.json"

# A checkpoint may bring any of these; without them the runtime's tokens are bytes.
TOKENIZER_FILES = (
    "tiktoken.model",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
)
GENERATION_CONFIG = "generation_config.json"

SAMPLE = 256  # bytes at each of three places of a tensor


@dataclass(frozen=True)
class ShardIdentity:
    """One shard: its content, and its state in the file system.

    Another `modified_ns` is a reason to pack it again, another `inode` (device, number, ctime) a
    reason to sample it again; neither makes it another shard.
    """

    name: str
    bytes: int
    header_sha256: str
    sample_sha256: str
    modified_ns: int
    inode: tuple[int, ...]


@dataclass(frozen=True)
class CheckpointIdentity:
    """A checkpoint's config, shards, and other files by name (sha256 of each)."""

    config_sha256: str
    shards: tuple[ShardIdentity, ...]
    files: dict[str, str]

    @classmethod
    def from_folder(cls, folder: Path, known: Iterable[ShardIdentity] = ()) -> "CheckpointIdentity":
        """Read all shards but the known ones that have not changed.

        Raises ConfigError, CheckpointError.
        """
        config_sha256 = config_hash(load_raw_config(folder))
        before = {shard.name: shard for shard in known}
        shards = tuple(_shard(folder / name, before.get(name)) for name in _shard_names(folder))
        names = (INDEX, *TOKENIZER_FILES, GENERATION_CONFIG)
        paths = [folder / name for name in names if (folder / name).is_file()]
        files = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}
        return cls(config_sha256, shards, files)

    @cached_property
    def fingerprint(self) -> str:
        """The hash of everything but times and inodes."""
        shards = [[s.name, s.bytes, s.header_sha256, s.sample_sha256] for s in self.shards]
        content = json.dumps([self.config_sha256, shards, sorted(self.files.items())])
        return hashlib.sha256(content.encode()).hexdigest()

    def difference(self, other: "CheckpointIdentity") -> str:
        """How another checkpoint differs from this one, in words: the first difference."""
        if self.config_sha256 != other.config_sha256:
            return "another config.json"
        if [s.name for s in self.shards] != [s.name for s in other.shards]:
            return "other shards"
        for shard, other_shard in zip(self.shards, other.shards, strict=True):
            if shard.header_sha256 != other_shard.header_sha256:
                return f"other tensors in {shard.name}"
            if shard.sample_sha256 != other_shard.sample_sha256:
                return f"other values in {shard.name}"
        changed = {name for name, _ in self.files.items() ^ other.files.items()}
        return f"another {min(changed)}" if changed else "no difference"


def _shard_names(folder: Path) -> list[str]:
    """The shards that the index names, or, without an index, all safetensors files."""
    path = folder / INDEX
    if not path.is_file():
        return sorted(shard.name for shard in folder.glob("*.safetensors"))
    try:
        names = set(json.loads(path.read_text(encoding="utf-8"))["weight_map"].values())
        return sorted(map(str, names))
    except (ValueError, KeyError, TypeError, AttributeError) as e:
        raise CheckpointError(f"{path}: expected a JSON object with 'weight_map' ({e!r})") from e


def _shard(path: Path, known: ShardIdentity | None) -> ShardIdentity:
    """Hash the header, and a sample of each tensor in the order of the header."""
    try:
        status = path.stat()
        inode = (status.st_dev, status.st_ino, status.st_ctime_ns)
        if known is not None and known.inode == inode and known.bytes == status.st_size:
            return known
        header, start = read_header(path)
    except OSError as e:
        raise CheckpointError(f"{path}: expected a shard: {e.strerror}") from e
    except BuildError as e:
        raise CheckpointError(str(e)) from e
    header.pop("__metadata__", None)
    sample = hashlib.sha256()
    with path.open("rb") as file:
        descriptor = file.fileno()
        header_sha256 = hashlib.sha256(os.pread(descriptor, start, 0)).hexdigest()
        for tensor in header.values():
            begin, end = tensor["data_offsets"]
            for offset in (begin, (begin + end - SAMPLE) // 2, end - SAMPLE):
                first = max(offset, begin)
                sample.update(os.pread(descriptor, min(SAMPLE, end - first), start + first))
    return ShardIdentity(
        path.name,
        status.st_size,
        header_sha256,
        sample.hexdigest(),
        status.st_mtime_ns,
        inode,
    )
