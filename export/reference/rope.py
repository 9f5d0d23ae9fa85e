"""Rotary frequencies and tables, with YaRN, in the arithmetic of the published model code."""

import math

import torch
from torch import Tensor

from graphs.contract.config import ModelConfig
from graphs.contract.rope_config import RopeConfig


def inverse_frequencies(rope: RopeConfig, width: int) -> Tensor:
    """Radians per position of each pair, fp32 [width/2].

    YaRN (arXiv 2309.00071 §3.2) keeps the pairs that turn often within the original context,
    divides the slow ones by `factor`, and blends linearly between the two correction dimensions.
    """
    exponents = torch.arange(0, width, 2).to(torch.float32) / width
    wavelengths = rope.rope_theta**exponents
    if rope.factor == 1.0:
        return 1.0 / wavelengths
    kept, interpolated = 1.0 / wavelengths, 1.0 / (rope.factor * wavelengths)
    low = max(math.floor(_correction_dim(rope, width, rope.beta_fast)), 0)
    high: float = min(math.ceil(_correction_dim(rope, width, rope.beta_slow)), width - 1)
    if low == high:
        high += 0.001
    ramp = torch.clamp((torch.arange(width // 2, dtype=torch.float32) - low) / (high - low), 0, 1)
    keep = 1 - ramp
    return interpolated * (1 - keep) + kept * keep


def _correction_dim(rope: RopeConfig, width: int, rotations: float) -> float:
    """The dimension whose pair makes `rotations` turns within the original context."""
    turns = rope.original_max_position_embeddings / (rotations * 2 * math.pi)
    return width * math.log(turns) / (2 * math.log(rope.rope_theta))


def rope_tables(config: ModelConfig, positions: int | None = None) -> tuple[Tensor, Tensor]:
    """cos and sin, fp32 [P, R/2]; by default for all positions of the model."""
    count = config.max_position_embeddings if positions is None else positions
    frequencies = inverse_frequencies(config.rope, config.qk_rope_head_dim)
    angles = torch.arange(count).to(torch.float32)[:, None] * frequencies
    multiplier = config.rope.table_multiplier
    return angles.cos() * multiplier, angles.sin() * multiplier
