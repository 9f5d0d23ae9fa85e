"""Where a test of what runs on any device lets its tensors lie."""

from collections.abc import Callable

from runtime.devices.base import Device, HostDevice
from runtime.devices.cuda import CudaDevice
from tests.support.doubles.cuda import DriverDouble


def double() -> CudaDevice:
    """A GPU's, on the host's memory."""
    return CudaDevice(DriverDouble())


def gpu() -> Device:
    """The real one."""
    return CudaDevice.open()


DEVICES: list[Callable[[], Device]] = [HostDevice, double]
