"""Threads, and builds of the shipped small model."""

import functools
import os
from collections.abc import Iterator

# One thread wherever a test does not say otherwise: those of torch and of ONNX Runtime would wait
# for each other in busy loops. Read when the libraries are loaded, so set before they are.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import pytest
import torch
from hypothesis import settings

from export.checkpoint.open import Checkpoint
from graphs.contract.manifest import Profile
from graphs.contract.spec import BuildSpec, Precision
from runtime.backends import Backend
from runtime.backends.onnxruntime import OnnxRuntimeBackend
from runtime.devices.base import HostDevice, no_progress
from runtime.devices.weights import Weights
from runtime.step.chain import Chain
from tests.support import shared_builds
from tests.support.builds import NANO, ON_GPU, PROFILE, Build, OpenBackend, OpenChain

settings.register_profile("derandomised", derandomize=True, deadline=None)
settings.load_profile("derandomised")


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def _shared_builds_stay_as_they_are() -> Iterator[None]:
    yield
    assert shared_builds.store().changed_files() == []


@pytest.fixture(scope="session")
def checkpoint() -> Checkpoint:
    """k2-nano's checkpoint."""
    return Checkpoint.open(NANO)


@pytest.fixture(scope="session")
def nano(checkpoint: Checkpoint) -> Build:
    """k2-nano, built for a precision: graphs, weights and goldens. Tests do not change it."""
    return functools.cache(functools.partial(shared_builds.shared_build, checkpoint))


@pytest.fixture(scope="session")
def onnxruntime_backend(nano: Build) -> OpenBackend:
    """ONNX Runtime on the CPU: one backend a precision, whatever the profile."""

    @functools.cache
    def open_backend(precision: Precision) -> Backend:
        build, spec = nano(precision), BuildSpec.load(nano(precision))
        backend = OnnxRuntimeBackend(build, spec, HostDevice(), threads=1, batch_invariant=True)
        backend.load_weights(Weights.open(build, spec), no_progress)
        return backend

    return lambda precision, profile: open_backend(precision)


@pytest.fixture(scope="session")
def double_backend(nano: Build, tmp_path_factory: pytest.TempPathFactory) -> OpenBackend:
    """TensorRT's, on the double of its runtime; one a precision and profile, as with engines."""

    @functools.cache
    def open_backend(precision: Precision, profile: Profile) -> Backend:
        build, spec = nano(precision), BuildSpec.load(nano(precision))
        from tests.support.doubles.tensorrt import open_double

        backend, _ = open_double(build, spec, profile, tmp_path_factory.mktemp("engines"))
        backend.load_weights(Weights.open(build, spec), no_progress)
        return backend

    return open_backend


@pytest.fixture(scope="session")
def tensorrt_backend(nano: Build) -> OpenBackend:
    """TensorRT on this machine's GPU."""
    from tests.support.gpu_backends import tensorrt_backends

    return tensorrt_backends(nano)


@pytest.fixture(scope="session")
def cuda_backend(nano: Build) -> OpenBackend:
    """ONNX Runtime on this machine's GPU."""
    from tests.support.gpu_backends import cuda_backends

    return cuda_backends(nano)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """A test that needs a GPU is skipped, with the reason, where there is none."""
    if item.get_closest_marker("gpu"):
        from tests.support.gpu_backends import absent

        if reason := absent():
            pytest.skip(f"needs a GPU: {reason}")


@pytest.fixture(params=["onnxruntime", "double", *ON_GPU])
def open_chain(request: pytest.FixtureRequest, nano: Build) -> OpenChain:
    """Once on each backend; backends are kept from test to test, caches are not."""
    open_backend: OpenBackend = request.getfixturevalue(f"{request.param}_backend")

    def open_one(
        precision: Precision = "fp32", profile: Profile = PROFILE, cache: int = 1024
    ) -> Chain:
        build = nano(precision)
        spec = BuildSpec.load(build)
        backend = open_backend(precision, profile)
        return Chain(spec, Weights.open(build, spec), backend, profile, cache)

    return open_one


@pytest.fixture
def chain(open_chain: OpenChain) -> Chain:
    """k2-nano in fp32 with a fresh cache, once on each backend."""
    return open_chain()
