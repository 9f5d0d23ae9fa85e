"""Opening a build: how large the cache becomes, and what is refused before memory is taken."""

from types import SimpleNamespace
from typing import Any

import pytest

from graphs.contract.manifest import Profile
from graphs.contract.spec import BuildError, BuildSpec
from runtime.cache.budget import BudgetError
from runtime.devices.base import DeviceError, HostDevice
from runtime.load import LoadOptions, OptionError, cache_row_bytes, load_chain
from tests.support.builds import Build

SMALL = Profile(batch=4, tokens=32, context=200)


def test_the_cache_has_room_for_the_batch_by_default(nano: Build) -> None:
    chain = load_chain(nano("fp32"), profile=SMALL, threads=1)
    assert chain.cache.capacity == 4 * 256


@pytest.mark.parametrize(("cache", "rows"), [(1, 64), (65, 128), ("1MB", 384)])
def test_rows_or_memory_say_how_large_it_is(nano: Build, cache: int | str, rows: int) -> None:
    chain = load_chain(nano("fp32"), profile=SMALL, threads=1, cache=cache)
    assert chain.cache.capacity == rows
    assert cache_row_bytes(chain.spec) == 4 * 144 * 4 == chain.cache.stats.bytes_per_token


def test_a_share_is_of_what_the_buffers_leave_free(
    nano: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(HostDevice, "free_bytes", lambda self: 40_000_000)
    chain = load_chain(nano("fp32"), profile=SMALL, threads=1, cache="50%")
    most = 20_000_000 // cache_row_bytes(chain.spec)
    assert most // 2 < chain.cache.capacity < most


@pytest.mark.parametrize(
    ("cache", "expected"),
    [
        (0, "expected at least 1 row a layer, got 0"),
        ("100kB", r"got 100,000 bytes, 0 rows of 4 layers × 144 × 4 bytes = 2,304 bytes$"),
        ("lots", "bytes such as 2GiB"),
    ],
)
def test_too_little_is_refused_with_the_arithmetic(
    nano: Build, cache: int | str, expected: str
) -> None:
    with pytest.raises(BudgetError, match=expected):
        load_chain(nano("fp32"), profile=SMALL, threads=1, cache=cache)


def test_more_than_is_free_is_refused_before_any_of_it_is_taken(
    nano: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(HostDevice, "free_bytes", lambda self: 40_000_000)
    monkeypatch.setattr(HostDevice, "zeros", lambda *arguments: pytest.fail("memory was taken"))
    row = cache_row_bytes(BuildSpec.load(nano("fp32")))
    with pytest.raises(DeviceError, match=rf"cache {64_000 * row:,} = .* 40,000,000 are free"):
        load_chain(nano("fp32"), profile=SMALL, threads=1, cache=64_000)


def test_no_gpu_is_one_error(nano: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    built = SimpleNamespace(is_built=lambda: False)
    monkeypatch.setattr(torch.backends, "cuda", built)
    cases: list[dict[str, Any]] = [{"backend": "tensorrt"}, {"provider": "cuda"}]
    for options in cases:
        with pytest.raises(DeviceError, match="built without CUDA"):
            load_chain(nano("fp32"), **options)


def test_a_gpu_runs_graphs_as_exported_so_rounding_them_is_refused(nano: Build) -> None:
    with pytest.raises(BuildError, match="rounded: expected provider 'cpu', got 'cuda'"):
        load_chain(nano("fp32"), provider="cuda", rounded=True)


def test_an_option_of_another_backend_is_refused() -> None:
    for backend, options in (
        ("tensorrt", {"profile": SMALL}),
        ("tensorrt", {"threads": 0}),
        ("tensorrt", {"rounded": True}),
        ("onnxruntime", {"engines": "e"}),
    ):
        given: dict[str, Any] = {"backend": backend, **options}
        (name,) = options
        with pytest.raises(OptionError, match=f"{name}: expected backend .*, got '{backend}'"):
            LoadOptions(**given)
    assert LoadOptions(backend="tensorrt").limits is None and LoadOptions().limits == Profile()
