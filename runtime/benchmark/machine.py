"""Where and with what it was measured, for the report."""

import os
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from runtime.devices.cuda import CudaDevice
from runtime.step.chain import Chain

PACKAGES = ("numpy", "onnxruntime-gpu", "onnxruntime", "tensorrt-rtx", "tensorrt", "torch")


def describe_machine(chain: Chain) -> dict[str, Any]:
    """The device that ran it, and what its driver says of it."""
    device, host = chain.device, {"processor": _processor(), "cores": os.cpu_count()}
    if not isinstance(device, CudaDevice):
        return {"device": host["processor"]} | host
    return {
        "device": device.name,
        "sm": device.sm,
        "memory": device.driver.memory()[1],
        "bandwidth_by_driver": device.driver.bandwidth,
        "cache_bytes": device.driver.cache_bytes,
    } | host


def describe_versions(chain: Chain) -> dict[str, str]:
    """Of the build that ran, and of the packages installed."""
    spec, found = chain.spec, {}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    build = {"precision": spec.precision, "config_sha256": spec.config_sha256}
    return build | {"profile": chain.profile.name} | found


def _processor() -> str:
    """Its model's name, where Linux says it."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text("utf-8").splitlines() if path.is_file() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else os.uname().machine
