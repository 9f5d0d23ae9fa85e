"""A double of the GPU under CudaDevice: the host's memory, and work that is put off.

What the stream is given is done when somebody waits for it, in order. So a result that is read
without waiting is not there yet, what was sent from an array that was changed since is wrong, and
an event that nobody waited for has no time.
New memory is full of NaN. Memory is known by its address for as long as a tensor refers to it; as
with torch's allocator, work that the stream was given before that ended can still be done.
"""

import time
import weakref
from collections import deque
from collections.abc import Callable

import numpy as np
import torch

from graphs.contract.tensorfile import ALIGNMENT, Array

NAN_BYTE = 0xFF  # fp32, bf16 and e4m3 of nothing else are NaN


class GpuLostError(RuntimeError):
    """What a GPU only reports when it is waited for, and never recovers from in this process."""


class EventDouble:
    """runtime.devices.driver.Event: its time is when the stream came by."""

    def __init__(self, driver: "DriverDouble") -> None:
        self.driver, self.at = driver, -1.0

    def record(self) -> None:
        if not self.driver.working:
            raise RuntimeError("recorded on another stream than the one there is")
        self.at = time.perf_counter()

    def elapsed_time(self, end: "EventDouble") -> float:
        if min(self.at, end.at) < 0:
            raise RuntimeError("Both events must be recorded before calculating elapsed time.")
        if end.at < self.at:
            raise RuntimeError("The stream came by the end before the start.")
        return (end.at - self.at) * 1000


class DriverDouble:
    """runtime.devices.driver.Driver; see the module's docstring."""

    name = "Double RTX 6000"
    capability = (12, 0)
    stream = 0x57EA4
    bandwidth = 1e12
    cache_bytes = 2**20

    def __init__(self, total: int = 2**30) -> None:
        self.total = total
        self.live: dict[int, int] = {}  # address -> bytes
        self.queue: deque[Callable[[], object]] = deque()
        self.allocations = 0
        self.fails_at = 0  # the number of the allocation that finds no memory
        self.lost: GpuLostError | None = None
        self.working = False  # the stream, on what it was given

    def memory(self) -> tuple[int, int]:
        return self.total - sum(self.live.values()), self.total

    def empty(self, count: int) -> torch.Tensor:
        self.allocations += 1
        if self.allocations == self.fails_at or count > self.memory()[0]:
            raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {count} bytes")
        block = np.full(count + ALIGNMENT, NAN_BYTE, np.uint8)
        start = -block.ctypes.data % ALIGNMENT
        memory = block[start : start + count]
        address = memory.ctypes.data
        self.live[address] = count
        weakref.finalize(memory, self._free, address, block)  # the tensor's storage refers to it
        return torch.from_numpy(memory)

    def staging(self, count: int) -> torch.Tensor:
        return torch.full((count,), NAN_BYTE, dtype=torch.uint8)

    def event(self) -> EventDouble:
        return EventDouble(self)

    def submit(self, work: Callable[[], object]) -> None:
        if self.lost:
            raise self.lost
        self.queue.append(work)

    def wait(self) -> None:
        while self.queue and not self.lost:
            self.working = True
            try:
                self.queue.popleft()()
            except Exception as e:
                self.lost = GpuLostError(
                    f"CUDA error: an illegal memory access was encountered ({e})"
                )
            self.working = False
        if self.lost:
            self.queue.clear()
            raise self.lost

    def _free(self, address: int, block: Array) -> None:
        del self.live[address]
        if self.queue:
            self.queue.append(lambda: block)

    def holds(self, address: int, count: int) -> bool:
        """Whether these bytes are all in one allocation."""
        return any(a <= address and address + count <= a + n for a, n in self.live.items())
