"""Safetensors shards of a checkpoint: their headers, and their tensors by plain reads.

Nothing is mapped: mapped pages count as resident, and a layer of Kimi K2 has 17 GB of them. A
tensor is read into fresh memory, whole or by rows, which is freed when the reader drops it.
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
        """Read the whole tensor. Raises CheckpointError where the shard has become shorter."""
        return self._read(0, self.bytes).view(self.dtype).reshape(self.shape)

    def rows(self, at_once: int) -> Iterator[Tensor]:
        """Read the tensor in pieces of whole rows, about `at_once` bytes each, at least one row."""
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
                        f"{self.shard}: expected {size} bytes of tensor {self.name}, got {done}; "
                        "the file has changed since it was opened, so start again"
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
                f"{shard}: tensor {name}: expected a type among {', '.join(DTYPES)}, got "
                f"{entry['dtype']}"
            )
        begin = start + entry["data_offsets"][0]
        tensors[name] = Stored(name, shard, dtype, tuple(entry["shape"]), begin)
    return tensors


def stored_tensors(folder: Path) -> dict[str, Stored]:
    """Every tensor that the index names. Raises CheckpointError."""
    shard_of = _index(folder)
    headers = {}
    for shard in sorted(set(shard_of.values())):
        if Path(shard).name != shard or not (folder / shard).is_file():
            raise CheckpointError(
                f"{folder}: the index names shard {shard!r}, which is not in this folder; complete "
                "the download"
            )
        headers[shard] = shard_tensors(folder / shard)
    stored = {}
    for name, shard in shard_of.items():
        if name not in headers[shard]:
            raise CheckpointError(
                f"{folder / shard}: tensor {name} is missing, though {INDEX} places it there; "
                "download both again"
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
            raise CheckpointError(
                f"{path}: expected a JSON object with 'weight_map' ({e!r}); download it again"
            ) from e
        return {str(k): str(v) for k, v in shard_of}
    shards = sorted(folder.glob("*.safetensors"))
    if len(shards) != 1:
        raise CheckpointError(
            f"{folder}: expected {INDEX} or one .safetensors file, got {len(shards)} files without "
            "an index; complete the download"
        )
    return dict.fromkeys(shard_tensors(shards[0]), shards[0].name)
