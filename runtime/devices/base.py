"""Where a chain's tensors lie: the host's memory here, a GPU's in runtime/devices/cuda.py.

A chain, its cache and its backends are written once, for both. What they hold are *buffers*: numpy
arrays on the host, torch tensors on a GPU. Both can be sliced and reshaped alike, and that is all
the rest of the runtime does with them; every other operation is a device's.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np

from graphs.contract.tensorfile import ALIGNMENT, Array

Buffer = Any  # numpy.ndarray on the host, torch.Tensor on a GPU: contiguous, of a known device

LoadProgress = Callable[[str, int, int], None]  # what, bytes done, bytes in all


def no_progress(what: str, done: int, total: int) -> None:
    """LoadProgress that nobody watches."""


class DeviceError(RuntimeError):
    """A device that is missing or lacks memory; the message says what would help."""


class Device(Protocol):
    """One kind of memory. Work is done in the order of the calls."""

    kind: Literal["cpu", "cuda"]
    stream: int | None  # the handle of the CUDA stream that all work goes to; None on the host

    def free_bytes(self) -> int:
        """Memory that could be allocated now."""

    def zeros(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Buffer:
        """A new buffer, zeroed, on a 256-byte boundary. Raises DeviceError."""

    def place(self, tensors: Mapping[str, Array], progress: LoadProgress) -> dict[str, Buffer]:
        """Read-only weights, each on a 256-byte boundary. Raises DeviceError.

        The host leaves them where they lie, mapped from their file.
        """

    def view(self, buffer: Buffer, dtype: np.dtype[Any]) -> Buffer:
        """A flat buffer's bytes as one axis of another type."""

    def dtype(self, buffer: Buffer) -> np.dtype[Any]:
        """The elements' type, as numpy and ml_dtypes know it."""

    def address(self, buffer: Buffer) -> int:
        """Address of the first byte; also where the buffer has no elements.

        Raises ValueError where the buffer is not contiguous: what runs a graph would copy it.
        """

    def write(self, target: Buffer, source: Array) -> None:
        """Copy from the host, same shape and type. `source` may be changed afterwards."""

    def read(self, source: Buffer) -> Array:
        """A copy on the host, made when all earlier work has been done."""

    def take(self, source: Buffer, index: Array, target: Buffer) -> None:
        """target[i] = source[index[i]]; index int64, on the host."""

    def move_rows(self, rows: Buffer, source: int, target: int, count: int) -> None:
        """Copy rows along axis 1 of [layers, rows, W], where the two places may overlap."""

    def put_rows(self, rows: Buffer, places: Array, staged: Buffer, kept: Array) -> None:
        """rows[:, places] = staged[:, kept], for all layers at once; both flat int64, distinct."""

    def finite_rows(self, staged: Buffer, kept: Array) -> Array:
        """bool [layers, len(kept)], on the host: whether staged[layer, kept[i]] is all finite."""

    def timed(self, work: Callable[[], object]) -> float | None:
        """Do work to its end; returns the stream's seconds for it, None where there is no stream.

        Raises DeviceError.
        """


class HostDevice:
    """The CPU's memory; see Device."""

    kind: Literal["cpu", "cuda"] = "cpu"
    stream: int | None = None

    def free_bytes(self) -> int:
        """Memory that Linux would give without swapping."""
        lines = Path("/proc/meminfo").read_text("ascii").splitlines()
        fields = dict(line.split(":", 1) for line in lines)
        return int(fields["MemAvailable"].split()[0]) * 1024

    def zeros(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Buffer:
        count = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        try:
            block = np.zeros(count + ALIGNMENT, np.uint8)
        except MemoryError as e:
            raise DeviceError(
                f"{count:,} bytes of memory needed, {self.free_bytes():,} are free"
            ) from e
        start = -block.ctypes.data % ALIGNMENT
        return block[start : start + count].view(dtype).reshape(shape)

    def place(self, tensors: Mapping[str, Array], progress: LoadProgress) -> dict[str, Buffer]:
        return dict(tensors)

    def view(self, buffer: Buffer, dtype: np.dtype[Any]) -> Buffer:
        return buffer.view(dtype)

    def dtype(self, buffer: Buffer) -> np.dtype[Any]:
        dtype: np.dtype[Any] = buffer.dtype
        return dtype

    def address(self, buffer: Buffer) -> int:
        if not buffer.flags.c_contiguous:
            raise ValueError(f"expected a contiguous array, got strides {buffer.strides}")
        return int(buffer.ctypes.data)

    def write(self, target: Buffer, source: Array) -> None:
        assert target.shape == source.shape and target.dtype == source.dtype
        target[...] = source

    def read(self, source: Buffer) -> Array:
        result: Array = source.copy()
        return result

    def take(self, source: Buffer, index: Array, target: Buffer) -> None:
        np.take(source, index, axis=0, out=target, mode="clip")  # other modes go by way of a copy

    def move_rows(self, rows: Buffer, source: int, target: int, count: int) -> None:
        assert rows.flags.c_contiguous
        W = rows.shape[2]
        for layer in rows.reshape(len(rows), -1):  # on one axis numpy is memmove, without a copy
            layer[target * W : (target + count) * W] = layer[source * W : (source + count) * W]

    def put_rows(self, rows: Buffer, places: Array, staged: Buffer, kept: Array) -> None:
        rows[:, places] = staged[:, kept]

    def finite_rows(self, staged: Buffer, kept: Array) -> Array:
        finite: Array = np.isfinite(staged[:, kept]).all(axis=2)
        return finite

    def timed(self, work: Callable[[], object]) -> float | None:
        work()
        return None
