"""Where a test of what runs on any device lets its tensors lie."""

from collections.abc import Callable

from cuda_double import DriverDouble

from runtime.cuda import CudaDevice
from runtime.device import Device, HostDevice


def double() -> CudaDevice:
    """A GPU's, on the host's memory."""
    return CudaDevice(DriverDouble())


def gpu() -> Device:
    """The real one."""
    return CudaDevice.open()


DEVICES: list[Callable[[], Device]] = [HostDevice, double]
