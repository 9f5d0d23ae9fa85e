"""The shipped small model, and the types of the fixtures that build and open it."""

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import pytest

from graphs.contract.manifest import Profile
from graphs.contract.spec import Precision
from runtime.backends import Backend
from runtime.step.chain import Chain

ROOT = Path(__file__).parents[2]
NANO = ROOT / "models" / "k2-nano"

PROFILE = Profile(batch=8, tokens=128, context=1024)

Build = Callable[[Precision], Path]
OpenBackend = Callable[[Precision, Profile], Backend]

# Of the three builds of k2-nano, bf16's is made for slow tests only.
EACH_PRECISION = pytest.mark.parametrize(
    "precision", ["fp32", pytest.param("bf16", marks=pytest.mark.slow), "fp8"]
)
ON_GPU = [pytest.param(name, marks=pytest.mark.gpu) for name in ("tensorrt", "cuda")]


class OpenChain(Protocol):
    """k2-nano on one of the backends, with a fresh cache of so many rows a layer."""

    def __call__(
        self, precision: Precision = "fp32", profile: Profile = PROFILE, cache: int = 1024
    ) -> Chain: ...
