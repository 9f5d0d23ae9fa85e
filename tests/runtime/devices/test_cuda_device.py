"""The GPU's memory: what the host's device does is the truth, on a double and on a real GPU."""

import itertools
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

from graphs.contract.tensorfile import ALIGNMENT, DTYPES, Array
from runtime.devices import cuda
from runtime.devices.base import Buffer, DeviceError, HostDevice, no_progress
from runtime.devices.cuda import CudaDevice
from tests.support.doubles.cuda import DriverDouble

FP32 = np.dtype(np.float32)
TYPES = {name: dtype for name, (_, dtype) in DTYPES.items()} | {"uint8": np.dtype(np.uint8)}
LAYERS, ROWS, WIDTH = 3, 40, 6


@pytest.fixture(params=["double", pytest.param("gpu", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> CudaDevice:
    """Copies weights in pieces of 1,000 bytes; moves rows in pieces of 5."""
    monkeypatch.setattr(cuda, "PIECE", 1000)
    monkeypatch.setattr(cuda, "MOVED_AT_ONCE", 5 * LAYERS * WIDTH * FP32.itemsize)
    return CudaDevice(DriverDouble()) if request.param == "double" else CudaDevice.open()


def noise(shape: tuple[int, ...], dtype: np.dtype = FP32) -> Array:
    values = np.random.default_rng(0).normal(size=shape) * 8
    return values.astype(dtype)


def placed(device: CudaDevice | HostDevice, array: Array) -> Buffer:
    buffer = device.zeros(array.shape, array.dtype)
    device.write(buffer, array)
    return buffer


@pytest.mark.parametrize("dtype", TYPES.values(), ids=TYPES)
def test_a_new_buffer_is_zeroed_and_aligned(device: CudaDevice, dtype: np.dtype) -> None:
    for shape in (5, 3), (1,), (2, 0), (0,):
        buffer = device.zeros(shape, dtype)
        found = device.read(buffer)
        assert device.dtype(buffer) == found.dtype == dtype and found.shape == shape
        assert not found.view(np.uint8).any()
        address = device.address(buffer)
        assert address and address % ALIGNMENT == 0


@pytest.mark.parametrize("dtype", TYPES.values(), ids=TYPES)
def test_what_is_written_is_read_whatever_became_of_its_source(
    device: CudaDevice, dtype: np.dtype
) -> None:
    array = noise((7, 5), dtype)
    buffer, before = device.zeros((9, 5), dtype), array.copy()
    device.write(buffer[1:8], array)
    array[:] = 0
    found = device.read(buffer)
    assert found[1:8].tobytes() == before.tobytes()
    assert not found[[0, 8]].astype(np.float32).any()
    strided = device.read(buffer[1:8, 1:4])
    assert strided.tobytes() == before[:, 1:4].tobytes()
    with pytest.raises(AssertionError):
        device.write(buffer[:3], before[:2])


def test_nothing_is_done_before_it_is_waited_for() -> None:
    """So a test on the double fails where a result is used too early."""
    device = CudaDevice(DriverDouble())
    buffer = placed(device, noise((4,)))
    assert np.isnan(buffer.numpy()).all()
    device.wait()
    assert (buffer.numpy() == noise((4,))).all()


def test_addresses_are_those_of_slices_also_of_empty_ones(device: CudaDevice) -> None:
    buffer = device.zeros((4, 64), FP32)
    start = device.address(buffer)
    assert device.address(buffer[2:]) == start + 512
    assert device.address(buffer[3:3]) == start + 768
    assert device.address(buffer[1, :0]) == start + 256
    packed = device.zeros((512,), TYPES["uint8"])
    assert device.address(device.view(packed[256:], FP32)) == device.address(packed) + 256
    with pytest.raises(ValueError, match="expected a contiguous tensor, got strides"):
        device.address(buffer[:, :32])


def test_weights_lie_in_one_arena_each_on_a_boundary(device: CudaDevice) -> None:
    tensors = {name: noise((n, 33), dtype) for n, (name, dtype) in enumerate(TYPES.items(), 11)}
    tensors |= {"none": noise((0, 3)), "last": noise((300,))}
    for array in tensors.values():
        array.flags.writeable = False  # as mapped from a file
    steps: list[tuple[int, int]] = []
    buffers = device.place(tensors, lambda what, done, total: steps.append((done, total)))
    addresses = [device.address(buffer) for buffer in buffers.values()]
    assert all(address % ALIGNMENT == 0 for address in addresses)
    total = sum(array.nbytes for array in tensors.values())
    assert max(addresses) - min(addresses) < total + len(tensors) * ALIGNMENT
    for name, array in tensors.items():
        found = device.read(buffers[name])
        assert found.dtype == array.dtype and found.shape == array.shape
        assert found.tobytes() == array.tobytes()
    assert [total for _, total in steps] == [total] * len(steps) and steps[-1][0] == total
    done = [0, *(done for done, _ in steps)]
    assert all(0 < b - a <= 1000 for a, b in itertools.pairwise(done))


def test_rows_move_as_if_at_once(device: CudaDevice) -> None:
    """Onto themselves as well, up and down, by less and by more than what is moved at a time."""
    array = noise((LAYERS, ROWS, WIDTH))
    moves = [(0, 1, 12), (1, 0, 12), (0, 7, 30), (9, 2, 30), (3, 3, 4), (0, 20, 20), (5, 6, 1)]
    for source, target, count in moves:
        buffer, expected = placed(device, array), array.copy()
        device.move_rows(buffer, source, target, count)
        expected[:, target : target + count] = array[:, source : source + count]
        assert (device.read(buffer) == expected).all(), (source, target, count)


@pytest.mark.parametrize("dtype", [FP32, TYPES["bfloat16"]], ids=["fp32", "bf16"])
def test_rows_are_taken_put_and_checked_as_on_the_host(device: CudaDevice, dtype: np.dtype) -> None:
    host = HostDevice()
    staged = noise((LAYERS, 9, WIDTH), dtype)
    staged[1, 4, 2], staged[2, 0, 5] = np.nan, -np.inf
    places, kept = np.array([30, 2, 17]), np.array([4, 8, 0])
    found = []
    for one in (host, device):
        rows, new = placed(one, noise((LAYERS, ROWS, WIDTH), dtype)), placed(one, staged)
        target = one.zeros((3, ROWS * WIDTH), dtype)
        one.put_rows(rows, places, new, kept)
        one.take(rows.reshape(LAYERS, -1), np.array([2, 0, 2]), target)
        finite = one.finite_rows(new, kept)
        assert finite.tolist() == [[True] * 3, [False, True, True], [True, True, False]]
        found.append([one.read(rows).tobytes(), one.read(target).tobytes()])
    assert found[0] == found[1]


def test_all_layers_are_put_by_one_copy(
    device: CudaDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, copy = [], torch.Tensor.index_copy_

    def counted(*arguments: Any) -> Any:
        calls.append(0)
        return copy(*arguments)

    monkeypatch.setattr(torch.Tensor, "index_copy_", counted)
    rows, staged = (placed(device, noise((LAYERS, n, WIDTH))) for n in (ROWS, 4))
    device.put_rows(rows, np.arange(4), staged, np.arange(4))
    device.wait()
    assert len(calls) == 1


def test_indices_may_change_once_they_were_given(device: CudaDevice) -> None:
    rows, staged = placed(device, noise((1, 4, 2))), placed(device, noise((1, 4, 2)) + 1)
    places, kept = np.array([0]), np.array([1])
    device.put_rows(rows, places, staged, kept)
    places[:], kept[:] = 3, 2
    expected = noise((1, 4, 2))
    expected[:, 0] = expected[:, 1] + 1
    assert (device.read(rows) == expected).all()


def test_too_little_memory_is_said_with_the_sum() -> None:
    device = CudaDevice(DriverDouble(total=2**26))
    free = device.free_bytes()
    with pytest.raises(
        DeviceError, match=f"1,073,741,824 bytes needed, {free:,} of its 67,108,864"
    ):
        device.zeros((2**28,), FP32)
    with pytest.raises(DeviceError, match="Double RTX 6000: 67,108,864 bytes needed"):
        device.place({"w": np.zeros(2**26, np.uint8)}, no_progress)
    buffer = device.zeros((2**20,), FP32)
    assert device.free_bytes() == free - 2**22
    del buffer
    device.wait()
    assert device.free_bytes() == free
    with pytest.raises(DeviceError, match="16,777,216 bytes needed, 1,000 of its 1,000 are free"):
        CudaDevice(DriverDouble(total=1000))  # not even what moves rows


def test_no_memory_to_copy_from_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    device = CudaDevice(DriverDouble())
    rows = placed(device, noise((1, 4, 2)))

    def full(count: int) -> None:
        raise RuntimeError("out of host memory")

    monkeypatch.setattr(device.driver, "staging", full)
    for work in (lambda: device.read(rows), lambda: device.write(rows, noise((1, 4, 2)))):
        with pytest.raises(
            DeviceError, match="32 bytes of pinned memory on the host: not allocated: out of"
        ):
            work()


def test_a_gpu_that_failed_is_lost() -> None:
    device = CudaDevice(DriverDouble())
    rows = placed(device, noise((1, 4, 2)))
    device.take(rows, np.array([9]), rows)  # no such row: found when it is done
    with pytest.raises(DeviceError, match=r"illegal memory access.*this process has lost the GPU"):
        device.read(rows)
    with pytest.raises(DeviceError, match="has lost the GPU"):
        device.write(rows, noise((1, 4, 2)))


NO_DRIVER = "Found no NVIDIA driver on your system. Please check that you have an NVIDIA GPU"


@pytest.mark.parametrize(
    ("built", "says", "expected"),
    [
        (False, "", "torch .* is built without CUDA; install"),
        (True, NO_DRIVER, "^no NVIDIA driver that can be used: Found no NVIDIA driver"),
        (True, "No CUDA GPUs are available", "^no GPU that can be used: No CUDA GPUs"),
    ],
    ids=["torch", "driver", "GPU"],
)
def test_what_is_absent_is_said_before_anything_is_allocated(
    monkeypatch: pytest.MonkeyPatch, built: bool, says: str, expected: str
) -> None:
    def init() -> None:
        raise RuntimeError(says)

    def nothing(*arguments: object, **options: object) -> None:
        raise AssertionError("allocated")

    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: built)
    monkeypatch.setattr(torch.cuda, "init", init)
    monkeypatch.setattr(torch.cuda, "Stream", nothing)
    monkeypatch.setattr(torch, "empty", nothing)
    with pytest.raises(DeviceError, match=expected):
        CudaDevice.open()


@pytest.mark.gpu
def test_a_real_gpu_is_described() -> None:
    device = CudaDevice.open()
    assert device.name and device.sm >= 75 and device.stream
    free, total = device.driver.memory()
    assert 0 < device.free_bytes() == free <= total
    with pytest.raises(DeviceError, match="bytes needed"):
        device.zeros((2**50,), np.dtype(np.uint8))
    assert device.read(device.zeros((3,), FP32)).tolist() == [0, 0, 0]


def test_types_of_16_and_8_bits_are_known_to_torch() -> None:
    device = CudaDevice(DriverDouble())
    assert device.zeros((2,), np.dtype(ml_dtypes.bfloat16)).dtype == torch.bfloat16
    assert device.zeros((2,), np.dtype(ml_dtypes.float8_e4m3fn)).dtype == torch.float8_e4m3fn
