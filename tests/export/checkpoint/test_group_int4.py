"""Grouped INT4 against plain numpy and against compressed-tensors' own packing."""

import math

import numpy as np
import pytest
import torch
from compressed_tensors.compressors.pack_quantized.helpers import (
    pack_to_int32,
    unpack_from_int32,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from export.checkpoint.group_int4 import (
    GroupInt4,
    decode_int4,
    encode_int4,
    packed_shape,
    scale_shape,
)

SIZES = st.integers(1, 70)
GROUP_SIZES = st.sampled_from([1, 5, 8, 32])
SEEDS = st.integers(0, 1000)


def random_int4(rows: int, columns: int, group_size: int, seed: int) -> tuple[Tensor, GroupInt4]:
    """Integers −8 … 7, and the same packed by compressed-tensors with random bf16 scales."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randint(-8, 8, (rows, columns), generator=generator, dtype=torch.int8)
    scale = (
        torch.rand(scale_shape((rows, columns), group_size), generator=generator).bfloat16() + 0.01
    )
    return values, GroupInt4(pack_to_int32(values, 4), scale, (rows, columns), group_size)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(SIZES, SIZES, GROUP_SIZES, SEEDS)
def test_a_value_is_its_nibble_less_eight_times_its_groups_scale(
    rows: int, columns: int, group_size: int, seed: int
) -> None:
    _, weight = random_int4(rows, columns, group_size, seed)
    assert tuple(weight.packed.shape) == packed_shape((rows, columns))
    words, scale = weight.packed.numpy().astype(np.int64) & 0xFFFFFFFF, weight.scale.float().numpy()
    expected = np.empty((rows, columns), np.float32)
    for i, j in np.ndindex(rows, columns):
        nibble = int(words[i, j // 8] >> (4 * (j % 8))) & 15
        expected[i, j] = (nibble - 8) * scale[i, j // group_size]
    assert np.array_equal(decode_int4(weight).numpy(), expected)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(SIZES, SIZES, GROUP_SIZES, SEEDS)
def test_packing_is_that_of_compressed_tensors(
    rows: int, columns: int, group_size: int, seed: int
) -> None:
    values, weight = random_int4(rows, columns, group_size, seed)
    scale = weight.scale.float().repeat_interleave(group_size, dim=1)[:, :columns]
    assert torch.equal(decode_int4(weight), values.float() * scale)
    encoded = encode_int4(values.float(), group_size)
    unpacked = unpack_from_int32(encoded.packed, 4, torch.Size(encoded.shape))
    assert torch.equal(encoded.packed, pack_to_int32(unpacked, 4))


@settings(max_examples=40, deadline=None, derandomize=True)
@given(SIZES, SIZES, GROUP_SIZES, SEEDS)
def test_encoding_errs_by_about_half_a_step(
    rows: int, columns: int, group_size: int, seed: int
) -> None:
    torch.manual_seed(seed)
    weight = torch.randn(rows, columns) * 10 ** torch.empty(rows, 1).uniform_(-3, 1)
    weight[torch.rand(rows) < 0.1] = 0
    encoded = encode_int4(weight, group_size)
    scale = encoded.scale.float().repeat_interleave(group_size, dim=1)[:, :columns]
    error = (decode_int4(encoded) - weight).abs()
    assert (error <= scale * (0.5 + 7 / 256)).all()  # the scale itself is rounded to bf16
    assert (decode_int4(encoded)[weight == 0] == 0).all()


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_a_weight_that_is_not_finite_is_refused(value: float) -> None:
    weight = torch.randn(8, 8)
    weight[5, 2] = value
    with pytest.raises(ValueError, match="finite"):
        encode_int4(weight, 4)
