"""The memory that a build needs, compared with what is free before any is allocated."""

from dataclasses import dataclass

from runtime.devices.base import DeviceError


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes. Every device needs `scratch` and `buffers`, whatever share of the rest it holds."""

    free: int
    weights: int
    scratch: int
    buffers: int

    @property
    def left(self) -> int:
        """Bytes for the cache; negative where there is too little even without one."""
        return self.free - self.weights - self.scratch - self.buffers

    def require(self, cache: int) -> None:
        """Raises DeviceError, with the sum, where it does not all fit."""
        if cache <= self.left:
            return
        needed = self.weights + self.scratch + self.buffers + cache
        raise DeviceError(
            f"weights {self.weights:,} + scratch {self.scratch:,} + step buffers {self.buffers:,} "
            f"+ cache {cache:,} = {needed:,} bytes needed, {self.free:,} are free; "
            + self._devices(cache)
        )

    def _devices(self, cache: int) -> str:
        """How many devices would do if the layers and their cache were spread over them."""
        share = self.free - self.scratch - self.buffers
        if share <= 0:
            return "more devices like this would not help: each needs the scratch and the buffers"
        return f"it would take {-(-(self.weights + cache) // share)} with as much free"
