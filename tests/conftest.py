"""Builds of the shipped small model, made once per test run and precision."""

import functools
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from export.checkpoint import Checkpoint
from export.golden import write_goldens
from export.pack import pack
from export.to_onnx import export_graphs
from graphs.spec import Precision
from runtime.chain import Chain

NANO = Path(__file__).parent.parent / "models" / "k2-nano"

Build = Callable[[Precision], Path]


@pytest.fixture(scope="session", autouse=True)
def _two_threads() -> None:
    torch.set_num_threads(2)


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """For modules of tiny tensors: a second thread only waits, and long on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def checkpoint() -> Checkpoint:
    """k2-nano's checkpoint."""
    return Checkpoint.open(NANO)


@pytest.fixture(scope="session")
def nano(checkpoint: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> Build:
    """k2-nano, built for a precision: graphs, weights and goldens. Tests do not change it."""

    @functools.cache
    def build(precision: Precision) -> Path:
        folder = tmp_path_factory.mktemp("nano") / precision
        export_graphs(checkpoint.raw_config, precision, folder)
        pack(checkpoint, folder)
        write_goldens(checkpoint, folder)
        return folder

    return build


@pytest.fixture
def chain(nano: Build) -> Chain:
    """k2-nano in fp32 with a fresh cache."""
    return Chain.load(nano("fp32"), cache_rows=1024, threads=2)
