"""What a build takes of a device's memory, held against what is free before any of it is taken."""

from dataclasses import dataclass

from runtime.devices.base import DeviceError


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes. `scratch` and `buffers` are what every device needs, whatever it holds of the rest."""

    free: int
    weights: int
    scratch: int
    buffers: int

    @property
    def left(self) -> int:
        """What the cache can have; negative where even without one there is too little."""
        return self.free - self.weights - self.scratch - self.buffers

    def require(self, cache: int) -> None:
        """Raises DeviceError, with the sum, where all of it together does not fit."""
        if cache <= self.left:
            return
        needed = self.weights + self.scratch + self.buffers + cache
        raise DeviceError(
            f"weights {self.weights:,} + scratch {self.scratch:,} + step buffers {self.buffers:,} "
            f"+ cache {cache:,} = {needed:,} bytes asked for, {self.free:,} are free; "
            + self._devices(cache)
        )

    def _devices(self, cache: int) -> str:
        """How many devices would do, were the layers with their cache spread over them."""
        share = self.free - self.scratch - self.buffers
        if share <= 0:
            return "more devices like this would not do: each needs the scratch and the buffers"
        return f"it would take {-(-(self.weights + cache) // share)} with as much free"
