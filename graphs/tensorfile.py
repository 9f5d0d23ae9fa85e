"""Safetensors files as this project writes and maps them.

Written as a stream, one tensor at a time, each on a 256-byte boundary (what TensorRT asks of an
address), under a temporary name. Read through a memory map: a tensor is a numpy view of the file's
bytes, in ml_dtypes' types where numpy has none, so nothing is copied until it is used.
"""

import json
import mmap
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from graphs.spec import BuildError, TensorSpec

Array = NDArray[Any]

ALIGNMENT = 256

# ONNX's type name in lower case -> (safetensors' name, numpy type)
DTYPES: dict[str, tuple[str, np.dtype[Any]]] = {
    "float": ("F32", np.dtype(np.float32)),
    "bfloat16": ("BF16", np.dtype(ml_dtypes.bfloat16)),
    "float8e4m3fn": ("F8_E4M3", np.dtype(ml_dtypes.float8_e4m3fn)),
    "int64": ("I64", np.dtype(np.int64)),
}
_NUMPY = {stored: dtype for stored, dtype in DTYPES.values()}
_STORED = {dtype: stored for stored, dtype in DTYPES.values()}


def write_tensors(
    path: Path,
    shapes: Mapping[str, tuple[np.dtype[Any], tuple[int, ...]]],
    tensors: Iterator[tuple[str, Array]],
    metadata: Mapping[str, str],
) -> None:
    """Write `tensors` (in the order of `shapes`, which says what will come) to a new file.

    The format allows no gaps, so what aligns a tensor is a filler of bytes named `_fill_N`.
    """
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    offset = fillers = 0
    for name, (dtype, shape) in shapes.items():
        if rest := -offset % ALIGNMENT:
            header[f"_fill_{fillers}"] = {
                "dtype": "U8",
                "shape": [rest],
                "data_offsets": [offset, offset + rest],
            }
            offset, fillers = offset + rest, fillers + 1
        end = offset + int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        header[name] = {
            "dtype": _STORED[dtype],
            "shape": list(shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % ALIGNMENT)
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=path.name, delete=False) as file:
        try:
            file.write(len(text).to_bytes(8, "little") + text)
            start = file.tell()
            for (name, (dtype, shape)), (given, array) in zip(shapes.items(), tensors, strict=True):
                assert (name, dtype, shape) == (given, array.dtype, array.shape), (name, given)
                file.write(bytes(-(file.tell() - start) % ALIGNMENT))
                file.write(np.ascontiguousarray(array).view(np.uint8).data)
            assert file.tell() - start == offset
        except BaseException:
            Path(file.name).unlink()
            raise
    Path(file.name).chmod(0o644)
    Path(file.name).replace(path)


def write_arrays(path: Path, arrays: Mapping[str, Array], metadata: Mapping[str, str]) -> None:
    """`write_tensors` of what is in memory already."""
    shapes = {name: (array.dtype, array.shape) for name, array in arrays.items()}
    write_tensors(path, shapes, iter(arrays.items()), metadata)


@dataclass(frozen=True)
class TensorFile:
    """A mapped file: `metadata`, and tensors by name. Views stay valid while one is referenced."""

    path: Path
    metadata: dict[str, str]
    tensors: dict[str, Array]

    @classmethod
    def open(
        cls,
        path: Path,
        expected: Mapping[str, str] | None = None,
        tensors: Iterable[tuple[str, TensorSpec]] = (),
    ) -> "TensorFile":
        """Map a file whose metadata holds `expected` and whose tensors are as specified.

        Raises BuildError where it is absent, truncated, damaged, or of another model, precision or
        layer.
        """
        try:
            with safe_open(path, framework="np"):
                pass  # refuses truncated, trailing and gapped files
        except (SafetensorError, OSError) as e:
            raise BuildError(f"{path}: not a complete safetensors file: {e}") from e
        with path.open("rb") as opened:
            data = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
        size = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + size])
        metadata = header.pop("__metadata__", {})
        for key, value in (expected or {}).items():
            if metadata.get(key) != value:
                raise BuildError(
                    f"{path}: {key} {value!r} expected, found {metadata.get(key)!r}; it belongs to "
                    "another build"
                )
        views = {
            name: np.frombuffer(
                data,
                dtype=_NUMPY[entry["dtype"]],
                count=int(np.prod(entry["shape"], dtype=np.int64)),
                offset=8 + size + entry["data_offsets"][0],
            ).reshape(entry["shape"])
            for name, entry in header.items()
            if not name.startswith("_fill_")
        }
        file = cls(path, metadata, views)
        for name, spec in tensors:
            found = (file[name].dtype, file[name].shape)
            if found != (DTYPES[spec.dtype][1], spec.dims):
                raise BuildError(
                    f"{path}: {name}: {spec.dtype} {spec.dims} expected, found {found[0]} "
                    f"{found[1]}; pack the weights again"
                )
        return file

    def __getitem__(self, name: str) -> Array:
        if name not in self.tensors:
            raise BuildError(f"{self.path}: tensor {name} is missing; pack the weights again")
        return self.tensors[name]
