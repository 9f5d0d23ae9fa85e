"""Write a checkpoint's shards as a stream: each a header, then its tensors piece by piece.

A checkpoint of any size is thus written from a few MB of memory. Shards are filled in the order of
the tensors; within a shard tensors are sorted as safetensors' own writer sorts them, wide types
first and then by name, which aligns each to its type.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from export.checkpoint.shards import DTYPES, INDEX
from export.synthetic.write_checkpoint import write_indented_json
from graphs.contract.files import replacing
from graphs.contract.tensorfile import Array, header_bytes

ShardProgress = Callable[[str, int, int], None]  # file's name, bytes done, bytes in all

_STORED = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class NewTensor:
    """A tensor to be written; `pieces` makes its content, as arrays of bytes."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    pieces: Callable[[], Iterable[Array]]

    @property
    def bytes(self) -> int:
        return self.dtype.itemsize * torch.Size(self.shape).numel()


def write_shards(
    folder: Path, tensors: Sequence[NewTensor], shard_bytes: int, progress: ShardProgress
) -> list[Path]:
    """Write shards of at most `shard_bytes` (a larger tensor gets its own), then their index."""
    shards = list(_fill(tensors, shard_bytes))
    total, done = sum(t.bytes for t in tensors), 0
    weight_map: dict[str, str] = {}
    files = []
    for i, shard in enumerate(shards):
        files.append(folder / f"model-{i + 1:05d}-of-{len(shards):06d}.safetensors")
        for written in _write_shard(files[-1], shard):
            done += written
            progress(files[-1].name, done, total)
        weight_map |= dict.fromkeys((t.name for t in shard), files[-1].name)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    write_indented_json(folder / INDEX, index)
    return [*files, folder / INDEX]


def _fill(tensors: Iterable[NewTensor], shard_bytes: int) -> Iterator[list[NewTensor]]:
    shard: list[NewTensor] = []
    for tensor in tensors:
        if shard and sum(t.bytes for t in shard) + tensor.bytes > shard_bytes:
            yield shard
            shard = []
        shard.append(tensor)
    yield shard


def _write_shard(path: Path, tensors: Iterable[NewTensor]) -> Iterator[int]:
    """Write the tensors, and yield each one's size when it is written."""
    ordered = sorted(tensors, key=lambda t: (-t.dtype.itemsize, t.name))
    with replacing(path) as temporary, temporary.open("wb") as file:
        file.write(_header(ordered))
        for tensor in ordered:
            begin = file.tell()
            for piece in tensor.pieces():
                file.write(piece.data)
            assert file.tell() - begin == tensor.bytes, tensor.name
            yield tensor.bytes


def _header(tensors: Iterable[NewTensor]) -> bytes:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    position = 0
    for t in tensors:
        end = position + t.bytes
        offsets = [position, end]
        header[t.name] = {
            "dtype": _STORED[t.dtype],
            "shape": list(t.shape),
            "data_offsets": offsets,
        }
        position = end
    return header_bytes(header, alignment=8)
