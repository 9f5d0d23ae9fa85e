"""A GPU's memory, in torch tensors.

All work goes to one stream, in the order of the calls, so nothing waits but `read`. What comes from
the host is copied to pinned memory first, which torch keeps until the GPU has read it; so a caller
may change its array at once.
"""

from collections.abc import Callable, Mapping
from typing import Any, Literal

import numpy as np

from graphs.contract.tensorfile import ALIGNMENT, DTYPES, Array
from runtime.devices.base import Buffer, DeviceError, LoadProgress
from runtime.devices.driver import Driver, TorchDriver

PIECE = 64 * 2**20  # bytes of weights that are copied at a time
MOVED_AT_ONCE = 16 * 2**20  # bytes of rows that are moved at a time where the two places overlap


class CudaDevice:
    """See runtime.devices.base.Device; buffers are torch tensors."""

    kind: Literal["cpu", "cuda"] = "cuda"

    def __init__(self, driver: Driver) -> None:
        """Raises DeviceError."""
        import torch

        self.driver, self.name = driver, driver.name
        self.stream: int | None = driver.stream
        self.sm = driver.capability[0] * 10 + driver.capability[1]
        dtypes = [*(dtype for _, dtype in DTYPES.values()), np.dtype(np.uint8), np.dtype(bool)]
        self._types = {dtype: getattr(torch, dtype.name) for dtype in dtypes}
        self._dtypes = {torch_type: dtype for dtype, torch_type in self._types.items()}
        self._moved = self._allocate(MOVED_AT_ONCE)

    @classmethod
    def open(cls) -> "CudaDevice":
        """The GPU that CUDA names first. Raises DeviceError naming what is missing."""
        return cls(TorchDriver())

    def free_bytes(self) -> int:
        return self.driver.memory()[0]

    def zeros(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Buffer:
        count = int(np.prod(shape, dtype=np.int64))
        buffer = self._allocate(count * dtype.itemsize)
        self._do(buffer.zero_)
        return buffer.view(self._types[dtype]).view(shape)

    def place(self, tensors: Mapping[str, Array], progress: LoadProgress) -> dict[str, Buffer]:
        starts, end = {}, 0
        for name, array in tensors.items():
            starts[name] = end
            end += -(-array.nbytes // ALIGNMENT) * ALIGNMENT
        arena, placed = self._allocate(end), {}
        done, total = 0, sum(array.nbytes for array in tensors.values())
        for name, array in tensors.items():
            source = _bytes_of(array)
            target = arena[starts[name] : starts[name] + source.size]
            for first in range(0, source.size, PIECE):
                piece = source[first : first + PIECE]
                self._upload(target[first : first + PIECE], piece)
                done += piece.size
                progress("weights", done, total)
            placed[name] = target.view(self._types[array.dtype]).view(array.shape)
        return placed

    def view(self, buffer: Buffer, dtype: np.dtype[Any]) -> Buffer:
        return buffer.view(self._types[dtype])

    def dtype(self, buffer: Buffer) -> np.dtype[Any]:
        return self._dtypes[buffer.dtype]

    def address(self, buffer: Buffer) -> int:
        if not buffer.is_contiguous():
            raise ValueError(f"expected a contiguous tensor, got strides {buffer.stride()}")
        # data_ptr() of a tensor without elements is 0
        start: int = buffer.untyped_storage().data_ptr()
        return start + int(buffer.storage_offset()) * int(buffer.element_size())

    def write(self, target: Buffer, source: Array) -> None:
        assert tuple(target.shape) == source.shape and self.dtype(target) == source.dtype
        assert target.is_contiguous()
        self._upload(_flat(target), _bytes_of(source))

    def read(self, source: Buffer) -> Array:
        return self._landed(lambda: source.contiguous(), tuple(source.shape), self.dtype(source))

    def take(self, source: Buffer, index: Array, target: Buffer) -> None:
        places = self._index(index, source)
        self._do(lambda: target.copy_(source.index_select(0, places())))

    def move_rows(self, rows: Buffer, source: int, target: int, count: int) -> None:
        if abs(target - source) >= count:
            self._copy(rows[:, source : source + count], rows[:, target : target + count])
            return
        layers, _, W = rows.shape
        row_bytes = layers * W * rows.element_size()
        most = len(self._moved) // row_bytes
        assert most, f"a row: expected at most {len(self._moved)} bytes, got {row_bytes}"
        starts = range(0, count, most)
        for start in starts if target < source else reversed(starts):
            part, old, new = min(most, count - start), source + start, target + start
            staged = self._moved[: part * row_bytes].view(rows.dtype).view(layers, part, W)
            self._copy(rows[:, old : old + part], staged)
            self._copy(staged, rows[:, new : new + part])

    def put_rows(self, rows: Buffer, places: Array, staged: Buffer, kept: Array) -> None:
        targets, sources = self._index(places, rows), self._index(kept, rows)
        self._do(lambda: rows.index_copy_(1, targets(), staged.index_select(1, sources())))

    def finite_rows(self, staged: Buffer, kept: Array) -> Array:
        import torch

        sources = self._index(kept, staged)

        def finite() -> Buffer:
            return torch.isfinite(staged.index_select(1, sources())).all(dim=2)

        return self._landed(finite, (staged.shape[0], len(kept)), np.dtype(bool))

    def timed(self, work: Callable[[], object]) -> float | None:
        start, end = self.driver.event(), self.driver.event()
        self._do(start.record)
        work()
        self._do(end.record)
        self.wait()
        return start.elapsed_time(end) / 1000

    def wait(self) -> None:
        """Block until all work has been done. Raises DeviceError where the GPU failed."""
        try:
            self.driver.wait()
        except RuntimeError as e:
            raise self._error(e) from e

    def _allocate(self, count: int) -> Buffer:
        """Bytes on a 256-byte boundary, with an address of their own even where `count` is 0."""
        try:
            buffer = self.driver.empty(max(-(-count // ALIGNMENT), 1) * ALIGNMENT)[:count]
        except RuntimeError as e:
            raise self._error(e, count) from e
        assert self.address(buffer) % ALIGNMENT == 0
        return buffer

    def _upload(self, target: Buffer, source: Array) -> None:
        staged = self._staged(source)
        self._do(lambda: target.copy_(staged, non_blocking=True))

    def _landed(
        self, make: Callable[[], Buffer], shape: tuple[int, ...], dtype: np.dtype[Any]
    ) -> Array:
        """The buffer that `make` returns when its turn comes, copied to the host."""
        landing = self._staging(int(np.prod(shape, dtype=np.int64)) * dtype.itemsize)
        self._do(lambda: landing.copy_(_flat(make()), non_blocking=True))
        self.wait()
        content: Array = landing.numpy().copy()
        return content.view(dtype).reshape(shape)

    def _index(self, index: Array, neighbour: Buffer) -> Callable[[], Buffer]:
        """Makes the index int64, on the neighbour's device, when the work that needs it runs."""
        import torch

        staged = self._staged(_bytes_of(index.astype(np.int64)))
        return lambda: staged.to(neighbour.device, non_blocking=True).view(torch.int64)

    def _staged(self, source: Array) -> Buffer:
        staged = self._staging(source.size)
        staged.numpy()[:] = source
        return staged

    def _staging(self, count: int) -> Buffer:
        try:
            return self.driver.staging(count)
        except RuntimeError as e:
            raise DeviceError(
                f"{count:,} bytes of pinned memory on the host: not allocated: {e}"
            ) from e

    def _copy(self, source: Buffer, target: Buffer) -> None:
        self._do(lambda: target.copy_(source))

    def _do(self, work: Callable[[], object]) -> None:
        try:
            self.driver.submit(work)
        except RuntimeError as e:
            raise self._error(e) from e

    def _error(self, e: RuntimeError, count: int = 0) -> DeviceError:
        import torch

        if not isinstance(e, torch.OutOfMemoryError):
            return DeviceError(f"{self.name}: {e}; start again, this process has lost the GPU")
        free, total = self.driver.memory()
        need = f"{count:,} bytes needed" if count else "out of memory"
        return DeviceError(f"{self.name}: {need}, {free:,} of its {total:,} are free")


def _bytes_of(array: Array) -> Array:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def _flat(tensor: Buffer) -> Buffer:
    """The bytes of a contiguous tensor."""
    import torch

    return tensor.view(-1).view(torch.uint8)
