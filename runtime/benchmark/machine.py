"""The machine and the package versions of a benchmark, for its report."""

import os
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from runtime.devices.cuda import CudaDevice
from runtime.step.chain import Chain

PACKAGES = ("numpy", "onnxruntime-gpu", "onnxruntime", "tensorrt-rtx", "tensorrt", "torch")


def describe_machine(chain: Chain) -> dict[str, Any]:
    """The device that runs the chain, and what its driver says of it."""
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
    """Versions of the build and of the installed packages."""
    spec, installed = chain.spec, {}
    for package in PACKAGES:
        try:
            installed[package] = version(package)
        except PackageNotFoundError:
            continue
    build = {"precision": spec.precision, "config_sha256": spec.config_sha256}
    return build | {"profile": chain.profile.name} | installed


def _processor() -> str:
    """The processor's model name, where Linux says it."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text("utf-8").splitlines() if path.is_file() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else os.uname().machine
