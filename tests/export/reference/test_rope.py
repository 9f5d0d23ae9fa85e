"""Rotary tables and softmax scales against published figures and transformers, in both layouts."""

import math
from typing import Any

import pytest
import torch

from export.packing.layer_weights import half_layout
from export.reference.attention import rotate_interleaved
from export.reference.rope import inverse_frequencies, rope_tables
from graphs.contract.config import ModelConfig
from graphs.contract.rope_config import yarn_mscale
from graphs.ops.rope import rope
from tests.support.helpers import tiny_config, transformers_config

YARN = tiny_config()["rope_scaling"]


def full_size(theta: float, positions: int, **yarn: Any) -> dict[str, Any]:
    """A config with the family's head sizes: 128 without rope and 64 with."""
    return tiny_config(
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        rope_theta=theta,
        max_position_embeddings=positions,
        rope_scaling=YARN | yarn,
    )


CONFIGS = {
    "k2-0711": full_size(50000.0, 131072),
    "k2-0905": full_size(50000.0, 262144, factor=64.0),
    "k2.5": full_size(50000.0, 262144, factor=64.0, beta_fast=32.0),
    "deepseek-v3": full_size(10000.0, 163840, factor=40.0, beta_fast=32.0),
    "v2-lite": full_size(
        10000.0, 163840, factor=40.0, beta_fast=32.0, mscale=0.707, mscale_all_dim=0.707
    ),
    "two mscales": full_size(10000.0, 163840, factor=40.0, mscale_all_dim=0.5),
}
ALL = pytest.mark.parametrize("raw", CONFIGS.values(), ids=CONFIGS)

# name, last untouched pair, first fully interpolated pair, m, m², softmax scale
PUBLISHED = [
    ("k2-0711", 19, 20, 1.346573590, 1.813260434, 0.130860800),
    ("k2-0905", 19, 20, 1.415888308, 2.004739702, 0.144679626),
    ("k2.5", 8, 20, 1.415888308, 2.004739702, 0.144679626),
    ("deepseek-v3", 10, 23, 1.368887945, 1.873854207, 0.135233779),
    ("v2-lite", 10, 23, 1.260803777, 1.589626165, 0.114721387),
]


@pytest.mark.parametrize(("name", "low", "high", "m", "m2", "scale"), PUBLISHED)
def test_yarn_keeps_blends_and_divides_the_published_pairs(
    name: str, low: int, high: int, m: float, m2: float, scale: float
) -> None:
    settings = ModelConfig.from_dict(CONFIGS[name]).rope
    plain = settings.rope_theta ** -(torch.arange(0, 64, 2, dtype=torch.float64) / 64)
    share = inverse_frequencies(settings, 64).double() / plain  # 1: kept, 1/factor: interpolated
    torch.testing.assert_close(share[: low + 1], torch.ones(low + 1).double(), rtol=1e-6, atol=0)
    divided = torch.full((32 - high,), 1 / settings.factor).double()
    torch.testing.assert_close(share[high:], divided, rtol=1e-6, atol=0)
    ramp = (1 - torch.arange(1, high - low).double() / (high - low)) * (1 - 1 / settings.factor)
    blended = ramp + 1 / settings.factor
    torch.testing.assert_close(share[low + 1 : high], blended, rtol=1e-5, atol=0)


@pytest.mark.parametrize(("name", "low", "high", "m", "m2", "scale"), PUBLISHED)
def test_softmax_scale_carries_mscale_squared(
    name: str, low: int, high: int, m: float, m2: float, scale: float
) -> None:
    """Case 1: cos and sin are multiplied by exactly 1, and yet the softmax is not."""
    config = ModelConfig.from_dict(CONFIGS[name])
    assert config.rope.table_multiplier == 1.0
    assert yarn_mscale(config.rope.factor, config.rope.mscale_all_dim) == pytest.approx(
        m, abs=5e-10
    )
    assert config.rope.softmax_multiplier == pytest.approx(m2, abs=5e-10)
    assert config.softmax_scale == pytest.approx(scale, abs=5e-10)


def test_k2_frequencies_step_after_pair_19() -> None:
    """Case 4: beta_fast is the config's 1, not 32."""
    frequencies = inverse_frequencies(ModelConfig.from_dict(CONFIGS["k2-0711"]).rope, 64)
    expected = torch.tensor([2.27420e-3, 1.62176e-3, 3.61405e-5, 2.57722e-5])
    torch.testing.assert_close(frequencies[18:22], expected, rtol=5e-6, atol=0)


def test_equal_correction_dimensions_do_not_divide_by_zero() -> None:
    """Bounds that clamp to one dimension, 0: every pair behind it is divided."""
    settings = ModelConfig.from_dict(full_size(50000.0, 4096, beta_fast=660, beta_slow=660)).rope
    plain = settings.rope_theta ** -(torch.arange(0, 64, 2) / 64)
    share = inverse_frequencies(settings, 64) / plain
    torch.testing.assert_close(share, torch.tensor([1.0] + [1 / 32] * 31), rtol=1e-5, atol=0)


@ALL
def test_frequencies_equal_transformers(raw: dict[str, Any]) -> None:
    from transformers.models.deepseek_v3 import modeling_deepseek_v3 as published

    config = ModelConfig.from_dict(raw)
    expected = published.DeepseekV3RotaryEmbedding(transformers_config(raw)).inv_freq
    assert torch.equal(inverse_frequencies(config.rope, 64), expected)


@ALL
def test_tables_equal_transformers_at_every_position(raw: dict[str, Any]) -> None:
    from transformers.models.deepseek_v3 import modeling_deepseek_v3 as published

    config = ModelConfig.from_dict(raw)
    cos, sin = rope_tables(config)
    assert cos.shape == sin.shape == (config.max_position_embeddings, 32)
    positions = torch.cat([torch.arange(5000), torch.tensor([99_999, 100_000, len(cos) - 1])])
    embedding = published.DeepseekV3RotaryEmbedding(transformers_config(raw))
    expected_cos, expected_sin = embedding(torch.empty(0), positions[None])
    # transformers repeats each pair's value in the second half
    assert torch.equal(cos[positions], expected_cos[0, :, :32])
    assert torch.equal(sin[positions], expected_sin[0, :, :32])


@ALL
def test_softmax_scale_equals_transformers(raw: dict[str, Any]) -> None:
    from transformers.models.deepseek_v3 import modeling_deepseek_v3 as published

    with torch.device("meta"):
        attention = published.DeepseekV3Attention(transformers_config(raw), 0)
    assert ModelConfig.from_dict(raw).softmax_scale == pytest.approx(attention.scaling, rel=1e-15)


def test_without_scaling_the_tables_are_plain() -> None:
    raw = tiny_config(rope_scaling=None)
    cos, sin = rope_tables(ModelConfig.from_dict(raw), positions=8)
    angles = torch.arange(8)[:, None] * 50000.0 ** -(torch.arange(0, 16, 2) / 16)
    torch.testing.assert_close(cos, angles.cos(), rtol=0, atol=1e-6)
    torch.testing.assert_close(sin, angles.sin(), rtol=0, atol=1e-6)


def test_interleaved_in_half_layout_out() -> None:
    """Case 2: pairs (1, 2) and (3, 4) at position 3, turned by 3 and by 0.03."""
    angles = torch.tensor([3.0, 0.03])
    rotated = rotate_interleaved(torch.tensor([1.0, 2.0, 3.0, 4.0]), angles.cos(), angles.sin())
    pairs = [
        (a * math.cos(t) - b * math.sin(t), b * math.cos(t) + a * math.sin(t))
        for (a, b), t in zip([(1, 2), (3, 4)], (3.0, 0.03), strict=True)
    ]
    expected = torch.tensor([pairs[0][0], pairs[1][0], pairs[0][1], pairs[1][1]])
    torch.testing.assert_close(rotated, expected, rtol=1e-6, atol=0)


def test_rotation_equals_transformers_with_rope_interleave() -> None:
    """Case 2."""
    from transformers.models.deepseek_v3 import modeling_deepseek_v3 as published

    torch.manual_seed(0)
    raw = tiny_config(qk_rope_head_dim=4)
    config, positions = ModelConfig.from_dict(raw), torch.tensor([[3, 17, 500]])
    query, key = torch.randn(1, 2, 3, 4), torch.randn(1, 1, 3, 4)
    tables = published.DeepseekV3RotaryEmbedding(transformers_config(raw))(query, positions)
    cos, sin = (table[positions][:, None] for table in rope_tables(config))
    expected = published.apply_rotary_pos_emb_interleave(query, key, *tables)
    rotated = [rotate_interleaved(x, cos, sin) for x in (query, key)]
    assert all(torch.equal(a, b) for a, b in zip(rotated, expected, strict=True))
    assert not torch.equal(rotated[0], published.apply_rotary_pos_emb(query, key, *tables)[0])


def test_rows_in_half_layout_make_the_op_equal_the_reference() -> None:
    """Packing permutes the rows once; after the rotation the values are the same."""
    torch.manual_seed(0)
    config = ModelConfig.from_dict(tiny_config())
    x, positions = torch.randn(2, 3, 5, 16), torch.randint(0, 512, (2, 5))
    cos, sin = rope_tables(config)
    expected = rotate_interleaved(x, cos[positions][:, None], sin[positions][:, None])
    assert torch.equal(rope(x[..., half_layout(16)], cos, sin, positions), expected)
