"""The backends of a real GPU, for the tests that run on every backend."""

import functools

from graphs.contract.manifest import Compiler, Profile
from graphs.contract.spec import BuildSpec, Precision
from graphs.engines.compile import compile_build
from graphs.engines.targets import TARGETS
from runtime.backends import Backend
from runtime.backends.onnxruntime import OnnxRuntimeBackend
from runtime.backends.tensorrt import TensorRTBackend
from runtime.devices.base import DeviceError, no_progress
from runtime.devices.cuda import CudaDevice
from runtime.devices.weights import Weights
from tests.support.builds import Build, OpenBackend


@functools.cache
def absent() -> str:
    """Why no GPU can be used; empty where one can."""
    try:
        CudaDevice.open()
    except DeviceError as e:
        return str(e)
    return ""


def tensorrt_backends(nano: Build) -> OpenBackend:
    """Engines compiled for this GPU, by TensorRT-RTX where it knows the GPU."""

    @functools.cache
    def open_backend(precision: Precision, profile: Profile) -> Backend:
        gpu, build = CudaDevice.open(), nano(precision)
        compiler: Compiler = "rtx" if gpu.sm in TARGETS["rtx"] else "tensorrt"
        folder = build / compile_build(build, "auto", profile, compiler).folder
        spec = BuildSpec.load(build)
        backend = TensorRTBackend.open(build, spec, folder, gpu)
        backend.load_weights(Weights.open(build, spec), no_progress)
        return backend

    return open_backend


def cuda_backends(nano: Build) -> OpenBackend:
    """ONNX Runtime with its CUDA provider, on the graphs as exported."""

    @functools.cache
    def open_backend(precision: Precision) -> Backend:
        build, spec = nano(precision), BuildSpec.load(nano(precision))
        backend = OnnxRuntimeBackend(build, spec, CudaDevice.open(), batch_invariant=True)
        backend.load_weights(Weights.open(build, spec), no_progress)
        return backend

    return lambda precision, profile: open_backend(precision)
