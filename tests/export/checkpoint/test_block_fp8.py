"""Block FP8 against plain numpy, over ragged shapes."""

import math

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from export.checkpoint.block_fp8 import (
    E4M3,
    BlockFP8,
    channels_from_wide,
    decode,
    encode,
    expand_scale,
    grid_shape,
    to_channels,
)
from graphs.contract.tensorfile import Array

SIZES = st.integers(1, 70)
BLOCKS = st.tuples(st.sampled_from([1, 3, 16, 32]), st.sampled_from([1, 5, 16, 32]))
SEEDS = st.integers(0, 1000)
# The largest e4m3 step below 448 is 32: half of it, over 448.
HALF_STEP = 16 / 448


def random_weight(rows: int, columns: int, seed: int) -> Tensor:
    """Normal values whose magnitude varies from block to block, some rows and areas zero."""
    torch.manual_seed(seed)
    weight = torch.randn(rows, columns) * 10 ** torch.empty(rows, 1).uniform_(-3, 1)
    weight[torch.rand(rows) < 0.1] = 0
    weight[: rows // 3, : columns // 2] = 0
    return weight


def random_fp8(rows: int, columns: int, block_size: tuple[int, int], seed: int) -> BlockFP8:
    """Finite e4m3 bytes other than 0; scales that are powers of two, so products are exact."""
    torch.manual_seed(seed)
    magnitude = torch.randint(1, 0x7F, (rows, columns), dtype=torch.uint8)
    sign = torch.randint(0, 2, (rows, columns), dtype=torch.uint8) * 0x80
    scale = torch.exp2(torch.randint(-9, -3, grid_shape((rows, columns), block_size)).float())
    return BlockFP8((magnitude + sign).view(E4M3), scale, block_size)


def to_float64(weight: Tensor) -> Array:
    values: Array = weight.view(torch.uint8).numpy().view(ml_dtypes.float8_e4m3fn)
    return values.astype(np.float64)


def decode_by_loops(weight: BlockFP8) -> Array:
    """Every value times the scale of its scale block, located by integer division."""
    values, (a, b) = to_float64(weight.weight), weight.block_size
    for i, j in np.ndindex(*values.shape):
        values[i, j] *= float(weight.scale[i // a, j // b])
    return values


def rms(x: Tensor) -> float:
    return float(x.double().pow(2).mean().sqrt())


@settings(max_examples=60, deadline=None, derandomize=True)
@given(SIZES, SIZES, BLOCKS, SEEDS)
def test_encoding_errs_by_at_most_half_a_step(
    rows: int, columns: int, block_size: tuple[int, int], seed: int
) -> None:
    weight = random_weight(rows, columns, seed)
    encoded = encode(weight, block_size)
    assert encoded.weight.dtype == E4M3 and encoded.weight.shape == weight.shape
    assert encoded.scale.dtype == torch.float32
    height, width = block_size
    assert tuple(encoded.scale.shape) == (math.ceil(rows / height), math.ceil(columns / width))
    error, values = decode(encoded) - weight, weight.abs()
    for i, j in np.ndindex(*encoded.scale.shape):
        area = (
            slice(i * block_size[0], (i + 1) * block_size[0]),
            slice(j * block_size[1], (j + 1) * block_size[1]),
        )
        peak = float(values[area].max())
        assert float(error[area].abs().max()) <= peak * HALF_STEP * (1 + 1e-5)
        if peak:  # the peak itself is 448, so nothing of the range is lost
            assert encoded.weight[area].float().abs().max() == 448


@settings(max_examples=30, deadline=None, derandomize=True)
@given(SIZES, SIZES, BLOCKS, SEEDS)
def test_decoding_gives_each_value_its_blocks_scale(
    rows: int, columns: int, block_size: tuple[int, int], seed: int
) -> None:
    weight = random_fp8(rows, columns, block_size, seed)
    assert np.array_equal(decode(weight).numpy(), decode_by_loops(weight))


def test_the_last_block_of_576_rows_is_half_a_block() -> None:
    """Case 8."""
    weight = encode(random_weight(576, 256, 0), (128, 128))
    assert tuple(weight.scale.shape) == grid_shape((576, 256), (128, 128)) == (5, 2)
    scale = torch.arange(1.0, 11).view(5, 2)
    decoded = decode(BlockFP8(torch.ones(576, 256).to(E4M3), scale, (128, 128)))
    assert decoded.shape == (576, 256)
    assert decoded[511, 127] == 7 and (decoded[512:, :128] == 9).all()
    assert (decoded[512:, 128:] == 10).all()


def test_block_size_is_the_configs_not_the_shapes() -> None:
    """Case 9: 1000 rows on 8 scale rows are blocks of 128, not of 125."""
    assert grid_shape((1000, 256), (128, 128)) == (8, 2)
    scale = torch.arange(8.0)[:, None].expand(8, 2)
    decoded = decode(BlockFP8(torch.ones(1000, 256).to(E4M3), scale, (128, 128)))
    rows = [(decoded[:, 0] == i).nonzero().flatten().tolist() for i in range(8)]
    assert rows[0] == [*range(128)] and rows[7] == [*range(896, 1000)]


def test_zeros_stay_zeros() -> None:
    """Case 16: a row, a block and a matrix of zeros; nothing is divided by zero."""
    weight = torch.randn(40, 40)
    weight[3], weight[16:32, 16:32] = 0, 0
    for source in (weight, torch.zeros(40, 40)):
        block, channels = encode(source, (16, 16)), channels_from_wide(source)
        for decoded in (decode(block), to_channels(block).decode(), channels.decode()):
            assert torch.isfinite(decoded).all()
            assert (decoded[source == 0] == 0).all()


def test_a_block_of_zeros_does_not_coarsen_its_channels() -> None:
    """Its scale is arbitrary, so it must not become the scale of a whole row of scale blocks."""
    torch.manual_seed(0)
    weight = torch.randn(16, 48) * 0.01
    weight[:, 16:32] = 0
    error = to_channels(encode(weight, (16, 16))).decode() - weight
    assert rms(error) / rms(weight) <= 0.04
    arbitrary = encode(weight, (16, 16))
    arbitrary.scale[0, 1] = 1.0
    assert torch.equal(
        to_channels(arbitrary).decode(), to_channels(encode(weight, (16, 16))).decode()
    )


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_a_weight_that_is_not_finite_is_refused(value: float) -> None:
    """Case 16: torch's cast would saturate infinity silently."""
    weight = torch.randn(8, 8)
    weight[5, 2] = value
    with pytest.raises(ValueError, match="finite"):
        encode(weight, (4, 4))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(SIZES, SIZES, BLOCKS, SEEDS)
def test_channels_are_the_decoded_weight_encoded_again(
    rows: int, columns: int, block_size: tuple[int, int], seed: int
) -> None:
    """In numpy: decode, divide by the largest scale of the row of scale blocks, round to e4m3."""
    weight = random_fp8(rows, columns, block_size, seed)
    largest = np.repeat(weight.scale.numpy().max(axis=1), block_size[0])[:rows]
    expected = (decode_by_loops(weight) / largest[:, None]).astype(ml_dtypes.float8_e4m3fn)
    channels = to_channels(weight)
    assert np.array_equal(channels.scale.numpy(), largest)
    assert np.array_equal(to_float64(channels.weight), expected.astype(np.float64))


@settings(max_examples=30, deadline=None, derandomize=True)
@given(SIZES, SIZES, BLOCKS, SEEDS)
def test_blocks_with_the_largest_scale_keep_their_bytes(
    rows: int, columns: int, block_size: tuple[int, int], seed: int
) -> None:
    weight = encode(random_weight(rows, columns, seed), block_size)
    channels = to_channels(weight)
    repacked, source = channels.weight.view(torch.uint8), weight.weight.view(torch.uint8)
    kept = expand_scale(weight.scale, (rows, columns), block_size) == channels.scale[:, None]
    assert kept.any(dim=1).all()
    assert torch.equal(repacked[kept], source[kept])


def test_repacking_adds_three_percent_of_rms_at_most() -> None:
    """Normal weights at K2's block size; blocks that share one scale cost nothing."""
    torch.manual_seed(0)
    weight = encode(torch.randn(576, 1024) * 0.02, (128, 128))
    decoded = decode(weight)
    error = rms(to_channels(weight).decode() - decoded) / rms(decoded)
    assert 0.01 <= error <= 0.03
    one_scale = BlockFP8(weight.weight, torch.full_like(weight.scale, 0.01), (128, 128))
    assert torch.equal(to_channels(one_scale).decode(), decode(one_scale))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(SIZES, SIZES, SEEDS)
def test_wide_rows_are_scaled_to_their_own_peak(rows: int, columns: int, seed: int) -> None:
    weight = random_weight(rows, columns, seed)
    for source in (weight, weight.bfloat16()):
        channels = channels_from_wide(source)
        assert channels.weight.dtype == E4M3 and channels.scale.shape == (rows,)
        peaks = source.float().abs().amax(dim=1)
        error = (channels.decode() - source.float()).abs().amax(dim=1)
        assert (error <= peaks * HALF_STEP * (1 + 1e-5)).all()
        assert (channels.weight.float().abs().amax(dim=1)[peaks > 0] == 448).all()
