"""Safetensors shards of a checkpoint: what they hold, and reading it with plain reads.

Nothing is mapped: mapped pages count as resident, and a layer of Kimi K2 has 17 GB of them. A
tensor is read into memory of its own, whole or by rows, and goes when its reader is done with it.
"""

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from export.checkpoint.errors import CheckpointError as CheckpointError
from export.checkpoint.identity import INDEX as INDEX
from graphs.contract.spec import BuildError
from graphs.contract.tensorfile import read_header

# safetensors' type names → torch's
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


@dataclass(frozen=True)
class Stored:
    """One tensor in its shard: `begin` is the file offset of its first byte."""

    name: str
    shard: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int

    @property
    def bytes(self) -> int:
        return self.dtype.itemsize * torch.Size(self.shape).numel()

    def read(self) -> Tensor:
        """The whole tensor. Raises CheckpointError where the shard has become shorter."""
        return self._read(0, self.bytes).view(self.dtype).reshape(self.shape)

    def rows(self, at_once: int) -> Iterator[Tensor]:
        """The tensor in pieces of whole rows of about `at_once` bytes, at least one row each."""
        row = self.bytes // max(self.shape[0], 1)
        count = max(at_once // max(row, 1), 1)
        for first in range(0, self.shape[0], count):
            rows = min(count, self.shape[0] - first)
            piece = self._read(first * row, rows * row)
            yield piece.view(self.dtype).reshape(rows, *self.shape[1:])

    def _read(self, offset: int, size: int) -> Tensor:
        tensor = torch.empty(size, dtype=torch.uint8)
        content = tensor.numpy().data
        with self.shard.open("rb") as file:
            done = 0
            while done < size:
                got = os.preadv(file.fileno(), [content[done:]], self.begin + offset + done)
                if not got:
                    raise CheckpointError(
                        f"{self.shard}: tensor {self.name} ends behind the file's end; the file "
                        "has changed since it was opened"
                    )
                done += got
        return tensor


def shard_tensors(shard: Path) -> dict[str, Stored]:
    """Every tensor of a shard. Raises CheckpointError where the file is not whole."""
    try:
        header, start = read_header(shard)
    except BuildError as e:
        raise CheckpointError(str(e)) from e
    header.pop("__metadata__", None)
    tensors: dict[str, Stored] = {}
    for name, entry in header.items():
        dtype = DTYPES.get(entry["dtype"])
        if dtype is None:
            raise CheckpointError(
                f"{shard}: tensor {name}: type {entry['dtype']} found, known: {', '.join(DTYPES)}"
            )
        begin = start + entry["data_offsets"][0]
        tensors[name] = Stored(name, shard, dtype, tuple(entry["shape"]), begin)
    return tensors


def stored_tensors(folder: Path) -> dict[str, Stored]:
    """Every tensor of the index, found in its shard. Raises CheckpointError."""
    shard_of = _index(folder)
    headers = {}
    for shard in sorted(set(shard_of.values())):
        if Path(shard).name != shard or not (folder / shard).is_file():
            raise CheckpointError(f"{folder}: the index names shard {shard!r}, not in there")
        headers[shard] = shard_tensors(folder / shard)
    stored = {}
    for name, shard in shard_of.items():
        if name not in headers[shard]:
            raise CheckpointError(
                f"{folder / shard}: no tensor {name}, which {INDEX} says is in there"
            )
        stored[name] = headers[shard][name]
    return stored


def _index(folder: Path) -> dict[str, str]:
    """Tensor name → shard's file name, from the index or from the only shard."""
    path = folder / INDEX
    if path.is_file():
        try:
            shard_of = json.loads(path.read_text(encoding="utf-8"))["weight_map"].items()
        except (ValueError, KeyError, TypeError, AttributeError) as e:
            raise CheckpointError(f"{path}: a JSON object with 'weight_map' expected: {e}") from e
        return {str(k): str(v) for k, v in shard_of}
    shards = sorted(folder.glob("*.safetensors"))
    if len(shards) != 1:
        raise CheckpointError(
            f"{folder}: {INDEX} or one .safetensors file expected, found {len(shards)} files"
        )
    return dict.fromkeys(shard_tensors(shards[0]), shards[0].name)
