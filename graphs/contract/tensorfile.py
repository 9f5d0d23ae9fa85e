"""Safetensors files as this project writes and maps them.

Each tensor lies on a 256-byte boundary (what TensorRT asks of an address) and has its SHA-256 in
the header, so a file that was copied somewhere can be verified on its own. A file is written under
a temporary name, tensor by tensor and in any order, and gets its name when it is whole. Read
through a memory map, a tensor is a numpy view of the file's bytes, in ml_dtypes' types where numpy
has none, so nothing is copied until it is used.
"""

import hashlib
import json
import mmap
import os
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from graphs.contract.files import replacing
from graphs.contract.spec import BuildError, TensorSpec

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


Shapes = Mapping[str, tuple[np.dtype[Any], tuple[int, ...]]]

CHECKSUMS = "sha256"  # key of the metadata: a JSON object, tensor's name → hexadecimal digest


class TensorWriter:
    """A new file of tensors, for use in a `with`: it is there when the block ends, and only then.

    `write` may be called once a tensor, in any order and by several threads at a time. The format
    allows no gaps, so what aligns a tensor is a filler of bytes named `_fill_0`, `_fill_1` ….
    """

    def __init__(self, path: Path, shapes: Shapes, metadata: Mapping[str, str]) -> None:
        self.path, self.shapes = path, shapes
        self._metadata = dict(metadata)
        self._checksums = dict.fromkeys(shapes, "0" * 64)  # so that the header has its final size
        self._missing = set(shapes)
        self._spans = _spans(shapes)
        self._start = len(self._header())
        self.size = self._start + max((end for _, end in self._spans.values()), default=0)
        self._file = -1
        self._stack = ExitStack()

    def __enter__(self) -> "TensorWriter":
        temporary = self._stack.enter_context(replacing(self.path))
        self._file = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)
        self._stack.callback(os.close, self._file)
        os.truncate(self._file, self.size)
        return self

    def write(self, name: str, pieces: Iterable[Array]) -> int:
        """One tensor, in pieces of whole rows from the first to the last; returns its bytes."""
        dtype, shape = self.shapes[name]
        begin, end = self._spans[name]
        digest = hashlib.sha256()
        place = begin
        for piece in pieces:
            assert piece.dtype == dtype and piece.shape[1:] == shape[1:], (name, piece.dtype, shape)
            content = np.ascontiguousarray(piece).reshape(-1).view(np.uint8).data
            digest.update(content)
            place += _write_all(self._file, content, self._start + place)
        assert place == end, (name, place - begin, end - begin)
        self._checksums[name] = digest.hexdigest()
        self._missing.remove(name)
        return end - begin

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is not None:
            self._stack.__exit__(kind, error, traceback)
            return
        with self._stack:
            assert not self._missing, sorted(self._missing)[:3]
            _write_all(self._file, memoryview(self._header()), 0)
            os.fsync(self._file)  # a name must never outlive a crash that its bytes did not

    def _header(self) -> bytes:
        checksums = {CHECKSUMS: json.dumps(self._checksums, separators=(",", ":"))}
        header: dict[str, Any] = {"__metadata__": self._metadata | checksums}
        position = fillers = 0
        for name, (dtype, shape) in self.shapes.items():
            begin, end = self._spans[name]
            if rest := begin - position:
                header[f"_fill_{fillers}"] = _entry("U8", (rest,), position, begin)
                fillers += 1
            header[name] = _entry(_STORED[dtype], shape, begin, end)
            position = end
        return header_bytes(header, ALIGNMENT)


def header_bytes(header: Mapping[str, Any], alignment: int) -> bytes:
    """The first bytes of a safetensors file, padded so that tensors start at a multiple of
    `alignment`.
    """
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % alignment)
    return len(text).to_bytes(8, "little") + text


def read_header(path: Path) -> tuple[dict[str, Any], int]:
    """The header of a safetensors file, and where its tensors start. Raises BuildError."""
    try:
        with safe_open(path, framework="np"):
            pass  # refuses truncated, trailing and gapped files
    except (SafetensorError, OSError) as e:
        raise BuildError(f"{path}: not a complete safetensors file: {e}") from e
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        return json.loads(file.read(size)), 8 + size


def _spans(shapes: Shapes) -> dict[str, tuple[int, int]]:
    """Each tensor's first byte and the one behind its last, from the end of the header."""
    spans, position = {}, 0
    for name, (dtype, shape) in shapes.items():
        begin = position + -position % ALIGNMENT
        position = begin + int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        spans[name] = begin, position
    return spans


def _entry(stored: str, shape: tuple[int, ...], begin: int, end: int) -> dict[str, Any]:
    return {"dtype": stored, "shape": list(shape), "data_offsets": [begin, end]}


def _write_all(file: int, content: memoryview, offset: int) -> int:
    """The bytes written: all of them, since one call may take fewer."""
    done = 0
    while done < len(content):
        done += os.pwrite(file, content[done:], offset + done)
    return done


def write_arrays(path: Path, arrays: Mapping[str, Array], metadata: Mapping[str, str]) -> None:
    """A file of what is in memory already."""
    shapes = {name: (array.dtype, array.shape) for name, array in arrays.items()}
    with TensorWriter(path, shapes, metadata) as writer:
        for name, array in arrays.items():
            writer.write(name, [array])


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
        header, start = read_header(path)
        with path.open("rb") as opened:
            data = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
        metadata = header.pop("__metadata__", {})
        for key, value in (expected or {}).items():
            if metadata.get(key) != value:
                raise BuildError(
                    f"{path}: {key}: expected {value!r}, got {metadata.get(key)!r}; it belongs to "
                    "another build"
                )
        views = {
            name: np.frombuffer(
                data,
                dtype=_NUMPY[entry["dtype"]],
                count=int(np.prod(entry["shape"], dtype=np.int64)),
                offset=start + entry["data_offsets"][0],
            ).reshape(entry["shape"])
            for name, entry in header.items()
            if not name.startswith("_fill_")
        }
        file = cls(path, metadata, views)
        for name, spec in tensors:
            dtype, shape = file[name].dtype, file[name].shape
            if (dtype, shape) != (DTYPES[spec.dtype][1], spec.dims):
                raise BuildError(
                    f"{path}: {name}: expected {spec.dtype} {spec.dims}, got {dtype} {shape}; pack "
                    "the weights again"
                )
        return file

    def __getitem__(self, name: str) -> Array:
        if name not in self.tensors:
            raise BuildError(f"{self.path}: tensor {name} is missing; pack the weights again")
        return self.tensors[name]

    def verify(self) -> None:
        """Recompute every checksum. Raises BuildError naming the first tensor that differs."""
        expected: dict[str, str] = json.loads(self.metadata.get(CHECKSUMS, "{}"))
        for name, array in self.tensors.items():
            digest = hashlib.sha256(array.reshape(-1).view(np.uint8).data).hexdigest()
            if digest != expected.get(name):
                raise BuildError(
                    f"{self.path}: {name}: expected sha256 {expected.get(name)} from its header, "
                    f"got {digest}; copy the file again, or make it again"
                )
