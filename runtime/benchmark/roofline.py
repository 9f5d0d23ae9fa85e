"""The best that the GPU at hand could do, as far as its name or its driver tells."""

from dataclasses import dataclass

from graphs.budget.gpus import GPUS, Gpu
from graphs.budget.traffic import Traffic, roofline_seconds
from runtime.devices.base import Device
from runtime.devices.cuda import CudaDevice

AGREEING = 0.1  # relative difference of bandwidth up to which table and driver mean the same card


@dataclass(frozen=True)
class Roofline:
    """`gpu` where the table of public figures has it; bytes a second, with their source."""

    source: str
    gpu: Gpu | None
    bandwidth: float
    cache_bytes: int

    @classmethod
    def find(cls, device: Device) -> "Roofline | None":
        """None on the CPU, and on a GPU that neither table nor driver knows."""
        if not isinstance(device, CudaDevice):
            return None
        bandwidth, cache_bytes = device.driver.bandwidth, device.driver.cache_bytes
        gpu = recognise(device.name, device.sm, bandwidth)
        if gpu is not None:
            source = f"{gpu.label}, {_rate(gpu.bandwidth)} by its public figures"
            return cls(source, gpu, gpu.bandwidth, cache_bytes)
        if not bandwidth:
            return None
        clock = "by the driver's memory clock and bus width, operations uncounted"
        return cls(f"{_rate(bandwidth)} {clock}", None, bandwidth, cache_bytes)

    def seconds(self, traffic: Traffic) -> float:
        if self.gpu is None:
            return traffic.bytes / self.bandwidth
        return roofline_seconds(traffic, self.gpu)

    def floor_of(self, traffic: Traffic, layers: int) -> str:
        """Describes the floor, which is none where layers that take turns all stay in the L2."""
        if not self.in_cache(traffic, layers):
            return self.source
        return f"{self.source}; its L2 of {self.cache_bytes / 1e6:.0f} MB holds all that runs read"

    def in_cache(self, traffic: Traffic, layers: int) -> bool:
        return traffic.bytes * layers <= self.cache_bytes


def recognise(name: str, sm: int, bandwidth: float) -> Gpu | None:
    """The table's GPU for the driver's name, such as NVIDIA H100 80GB HBM3.

    Cards of one name differ (H100 SXM and PCIe, RTX 5090 and its laptop's namesake), so the
    driver's bandwidth, if it says any, has to agree.
    """
    words = set(name.lower().replace("-", " ").split())
    for gpu in GPUS.values():
        same = set(gpu.name.split("-")) <= words and gpu.sm == sm
        if same and (not bandwidth or abs(bandwidth / gpu.bandwidth - 1) <= AGREEING):
            return gpu
    return None


def _rate(bandwidth: float) -> str:
    return f"{bandwidth / 1e9:,.0f} GB/s"
