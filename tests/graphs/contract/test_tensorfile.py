"""Tensor files: what is written is mapped, aligned, and refused where it is not what was asked."""

import json
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open

from graphs.contract.spec import BuildError
from graphs.contract.tensorfile import (
    CHECKSUMS,
    DTYPES,
    Array,
    TensorFile,
    TensorWriter,
    write_arrays,
)

METADATA = {"content": "layer 3", "precision": "fp8", "config_sha256": "ab" * 32}


def arrays() -> dict[str, Array]:
    """One of every type; a scalar, an empty one; only `even` fills whole 256 bytes."""
    generator = np.random.default_rng(0)
    bits = generator.integers(0, 256, 4 * 105, dtype=np.uint8)
    made = {name: bits[: 15 * d.itemsize].view(d).reshape(3, 5) for name, (_, d) in DTYPES.items()}
    made["even"] = generator.standard_normal((4, 16)).astype(np.float32)
    made["scalar"] = np.array(7, np.int64)
    made["empty"] = np.zeros((0, 4), np.float32)
    made["long"] = generator.standard_normal(1000).astype(np.float32)
    return made


def write(path: Path, tensors: dict[str, Array]) -> None:
    write_arrays(path, tensors, METADATA)


def bytes_of(array: Array) -> bytes:
    """Compared as bytes, since NaN is not equal to itself."""
    return np.ascontiguousarray(array).tobytes()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    write(tmp_path / "x.safetensors", arrays())
    return tmp_path / "x.safetensors"


def test_every_type_comes_back_bit_for_bit(path: Path) -> None:
    file = TensorFile.open(path, METADATA)
    assert METADATA.items() <= file.metadata.items()
    assert list(file.tensors) == list(arrays())  # fillers are not shown
    for name, expected in arrays().items():
        array = file[name]
        assert (array.dtype, array.shape) == (expected.dtype, expected.shape), name
        assert bytes_of(array) == bytes_of(expected), name


def test_every_tensor_starts_on_a_256_byte_boundary_of_the_file(path: Path) -> None:
    content = path.read_bytes()
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    for name, expected in arrays().items():
        start, end = (8 + size + offset for offset in header[name]["data_offsets"])
        assert start % 256 == 0, name
        assert content[start:end] == bytes_of(expected), name
        if expected.size:
            assert TensorFile.open(path)[name].ctypes.data % 256 == 0, name


def test_tensors_are_mapped_and_cannot_be_written(path: Path) -> None:
    array = TensorFile.open(path)["long"]
    with pytest.raises(ValueError, match="read-only"):
        array[0] = 1


def test_safetensors_own_reader_reads_it(path: Path) -> None:
    with safe_open(path, framework="pt") as file:
        assert file.metadata().keys() == {*METADATA, CHECKSUMS}
        assert set(arrays()) == {name for name in file.keys() if not name.startswith("_fill_")}  # noqa: SIM118
        assert np.array_equal(file.get_tensor("long").numpy(), arrays()["long"])
        tensor = file.get_tensor("float8e4m3fn").view(dtype=file.get_tensor("_fill_0").dtype)
        assert bytes_of(tensor.numpy()) == bytes_of(arrays()["float8e4m3fn"])


def test_the_same_tensors_give_the_same_bytes_and_a_readable_file(path: Path) -> None:
    other = path.with_name("y.safetensors")
    write(other, arrays())
    assert other.read_bytes() == path.read_bytes()
    assert other.stat().st_mode & 0o777 == 0o644


def test_a_tensor_that_is_not_contiguous_is_written_in_its_order(tmp_path: Path) -> None:
    array = np.arange(12, dtype=np.float32).reshape(3, 4).T
    write(tmp_path / "x.safetensors", {"turned": array})
    assert np.array_equal(TensorFile.open(tmp_path / "x.safetensors")["turned"], array)


@pytest.mark.parametrize("end", [-1, -4000, 100, 0])
def test_a_truncated_file_is_refused(path: Path, end: int) -> None:
    path.write_bytes(path.read_bytes()[:end])
    with pytest.raises(BuildError, match=f"{path}: not a complete safetensors file"):
        TensorFile.open(path)


def test_a_file_with_more_than_it_says_is_refused(path: Path) -> None:
    path.write_bytes(path.read_bytes() + bytes(256))
    with pytest.raises(BuildError, match="not a complete safetensors file"):
        TensorFile.open(path)


def test_an_absent_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BuildError, match="not a complete safetensors file"):
        TensorFile.open(tmp_path / "absent.safetensors")


def test_a_file_of_another_build_is_refused(path: Path) -> None:
    TensorFile.open(path, {"precision": "fp8"})
    for key, value in {"precision": "bf16", "content": "layer 4", "new": "x"}.items():
        stored = METADATA.get(key)
        with pytest.raises(BuildError, match=f"{path}: {key}: expected '{value}', got {stored!r}"):
            TensorFile.open(path, METADATA | {key: value})


def test_a_missing_tensor_is_named(path: Path) -> None:
    with pytest.raises(BuildError, match=f"{path}: tensor absent is missing"):
        TensorFile.open(path)["absent"]


ONE = np.arange(1000, dtype=np.float32).reshape(50, 20)
SHAPES = dict.fromkeys("ab", (ONE.dtype, ONE.shape))


def test_tensors_may_come_in_any_order_in_pieces_and_from_several_threads(tmp_path: Path) -> None:
    expected = {f"t{i}": ONE + i for i in range(40)}
    write_arrays(tmp_path / "whole.safetensors", expected, METADATA)
    shapes = {name: (array.dtype, array.shape) for name, array in expected.items()}
    with TensorWriter(tmp_path / "x.safetensors", shapes, METADATA) as writer:
        assert not (tmp_path / "x.safetensors").exists()

        def work(name: str) -> int:
            array = expected[name]
            return writer.write(name, (array[i : i + 7] for i in range(0, 50, 7)))

        with ThreadPoolExecutor(4) as pool:
            assert set(pool.map(work, reversed(expected))) == {4000}
    assert (tmp_path / "x.safetensors").stat().st_size == writer.size
    whole = (tmp_path / "whole.safetensors").read_bytes()
    assert (tmp_path / "x.safetensors").read_bytes() == whole


def test_verifying_names_the_tensor_whose_bytes_changed(path: Path) -> None:
    TensorFile.open(path).verify()
    content = bytearray(path.read_bytes())
    place = content.index(arrays()["long"].tobytes())
    content[place + 5] ^= 1
    path.write_bytes(content)
    with pytest.raises(BuildError, match=f"{path}: long: expected sha256 [0-9a-f]{{64}}"):
        TensorFile.open(path).verify()


class PackingError(Exception):
    pass


def failing() -> Iterator[Array]:
    yield ONE[:10]
    raise PackingError


@pytest.mark.parametrize(
    ("tensors", "error"),
    [
        ({"a": failing()}, PackingError),
        ({"a": [ONE]}, AssertionError),
        ({"a": [ONE], "b": [ONE], "c": [ONE]}, KeyError),
        ({"a": [ONE], "b": [ONE[:-1]]}, AssertionError),
        ({"a": [ONE], "b": [ONE, ONE[:1]]}, AssertionError),
        ({"a": [ONE], "b": [ONE.astype(np.int64)]}, AssertionError),
    ],
    ids=["raises", "too few", "too many", "too short", "too long", "another type"],
)
def test_a_write_that_fails_leaves_what_was_there(
    tmp_path: Path, tensors: dict[str, Iterable[Array]], error: type[Exception]
) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(b"before")
    with pytest.raises(error), TensorWriter(path, SHAPES, METADATA) as writer:
        for name, pieces in tensors.items():
            writer.write(name, pieces)
    assert [(p.name, p.read_bytes()) for p in tmp_path.iterdir()] == [(path.name, b"before")]
