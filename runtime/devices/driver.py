"""One GPU and one stream of it, as the device uses them: the protocol, and torch.cuda behind it.

The tests put the host's memory behind the same protocol, and work that is put off until somebody
waits for it.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from runtime.devices.base import DeviceError

if TYPE_CHECKING:
    import torch


class Event(Protocol):
    """A CUDA event that keeps time."""

    def record(self) -> None:
        """Mark this place in the stream; called by work that the stream is given."""

    def elapsed_time(self, end: Any, /) -> float:
        """Milliseconds to a later event. Raises RuntimeError before the stream has reached both."""


class Driver(Protocol):
    """One GPU and one stream of it."""

    name: str
    capability: tuple[int, int]
    stream: int  # the stream's CUDA handle

    @property
    def bandwidth(self) -> float:
        """The memory's bytes a second, by its clock and bus width; 0 where they are not known."""

    @property
    def cache_bytes(self) -> int:
        """The L2 cache's size; 0 where it is not known."""

    def memory(self) -> tuple[int, int]:
        """Free bytes and total bytes."""

    def empty(self, count: int) -> "torch.Tensor":
        """Allocate `count` bytes of the GPU's memory. Raises torch.OutOfMemoryError."""

    def staging(self, count: int) -> "torch.Tensor":
        """Allocate `count` pinned bytes on the host, for a copy that the stream makes."""

    def event(self) -> Event:
        """A new event."""

    def submit(self, work: Callable[[], object]) -> None:
        """Queue work, written in torch's operations, behind all that the stream was given."""

    def wait(self) -> None:
        """Block until the stream has done all that it was given."""


class TorchDriver:
    """Driver of a real GPU, the one that CUDA names first."""

    def __init__(self) -> None:
        """Raises DeviceError."""
        try:
            import torch
        except ImportError as e:
            raise DeviceError(
                f"torch: expected for the GPU's memory, got: {e}; do pip install '.[cuda]' in the "
                "folder of kimi-trt's sources, or use the backend onnxruntime"
            ) from e
        if not torch.backends.cuda.is_built():  # type: ignore[no-untyped-call]
            raise DeviceError(
                f"torch {torch.__version__} is built without CUDA; install a build with it, as "
                "https://pytorch.org/get-started/locally says, or use the backend onnxruntime"
            )
        try:
            torch.cuda.init()  # type: ignore[no-untyped-call]
        except RuntimeError as e:
            missing = "no NVIDIA driver" if "driver" in str(e) else "no GPU"
            raise DeviceError(
                f"{missing} that can be used: {e}; or use the backend onnxruntime"
            ) from e
        self._cuda, self._empty = torch.cuda, torch.empty
        self._bytes = torch.uint8
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self.name = torch.cuda.get_device_name()
        self.capability = torch.cuda.get_device_capability()
        self.stream: int = self._stream.cuda_stream

    def memory(self) -> tuple[int, int]:
        free, total = self._cuda.mem_get_info()
        unused = self._cuda.memory_reserved() - self._cuda.memory_allocated()
        return free + unused, total

    def empty(self, count: int) -> "torch.Tensor":
        with self._cuda.stream(self._stream):
            return self._empty(count, dtype=self._bytes, device="cuda")

    def staging(self, count: int) -> "torch.Tensor":
        return self._empty(count, dtype=self._bytes, pin_memory=True)

    @property
    def bandwidth(self) -> float:
        kilohertz, bits = self._property("memory_clock_rate"), self._property("memory_bus_width")
        return 2 * kilohertz * 1000 * bits / 8  # two transfers a cycle

    @property
    def cache_bytes(self) -> int:
        return self._property("L2_cache_size")

    def _property(self, name: str) -> int:
        return int(getattr(self._cuda.get_device_properties(), name, 0))

    def event(self) -> Event:
        event: Event = self._cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        return event

    def submit(self, work: Callable[[], object]) -> None:
        with self._cuda.stream(self._stream):
            work()

    def wait(self) -> None:
        self._stream.synchronize()
