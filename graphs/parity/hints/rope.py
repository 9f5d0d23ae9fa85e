"""Faults of the rotary embedding: layouts, positions, and the frequencies of the tables.

The checkpoint's rope rows are interleaved, pair i being rows 2i and 2i+1; the engines' are in half
layout, i and i+R/2, which packing makes of them. Before the rotation a fault of layout is a
permutation of what was expected; behind it, a rotation of the wrong pairs.
"""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from graphs.contract.rope_config import RopeConfig
from graphs.contract.tensorfile import Array
from graphs.parity.findings import Hint
from graphs.parity.hints.evidence import Candidate, Evidence

SWAPPED = "rope_layout_swapped"


def layout_hints(evidence: Evidence, tap: str) -> list[Hint]:
    """Hints on q^pe or k^pe before the rotation, in the reference's interleaved layout."""
    expected = evidence.expected(tap)
    interleaved = "the weight's rope rows were left interleaved, where half layout is read"
    twice = "the weight's rope rows were put in half layout twice"
    candidates = [
        Candidate(SWAPPED, interleaved, _pairs(expected)),
        Candidate(SWAPPED, twice, _halves(expected)),
    ]
    return evidence.best(tap, candidates, evidence.computed(tap), expected)


def rotation_hints(evidence: Evidence, tap: str) -> list[Hint]:
    """Hints on q^pe after the rotation, or on the rotated key in the new rows."""
    actual, expected = evidence.computed(tap), evidence.expected(tap)
    if tap == "new":
        C = evidence.config.kv_lora_rank
        actual, expected = actual[..., C:], expected[..., C:]
    before = evidence.computed("k_pe" if tap == "new" else "q_pe")
    half, (cos, sin) = _halves(before), _at(evidence, before, 0)
    faultless = _rotated(half, cos, sin)
    pairs = "interleaved pairs are rotated, in half layout"
    halves = "halves are rotated, in the checkpoint's interleaved layout"
    wrong = [
        Candidate(SWAPPED, pairs, _pairwise(half, cos, sin)),
        Candidate(SWAPPED, halves, _rotated(before, cos, sin)),
        Candidate("rope_direction", "rotated the wrong way round", _rotated(half, cos, -sin)),
        Candidate("rope_skipped", "not rotated at all", half),
    ]
    for shift, text in SHIFTS.items():
        turned = _rotated(half, *_at(evidence, before, shift))
        wrong.append(Candidate(LENGTH, f"rotated for positions that are {text}", turned))
    if hints := evidence.best(tap, wrong, actual, expected, faultless):
        return hints
    return _input_hints(evidence, tap, half, faultless, actual, expected)


LENGTH = "context_length_off_by_one"
SHIFTS = {
    1: "one too far: the context length is off by one",
    -1: "one too near: the context length is off by one",
}


def _input_hints(
    evidence: Evidence, tap: str, half: Array, faultless: Array, actual: Array, expected: Array
) -> list[Hint]:
    """Hints on the rotation's inputs: its tables, or its positions."""
    cause, text = table_fault(evidence.config.rope, evidence.weight("cos"), evidence.weight("sin"))
    if cause:
        return evidence.best(tap, [Candidate(cause, text, faultless)], actual, expected)
    shifted = [
        # were positions that much different, the reference's result would come out
        Candidate(LENGTH, f"the positions are {text}", _rotated(half, *_at(evidence, half, -shift)))
        for shift, text in SHIFTS.items()
    ]
    return evidence.best(tap, shifted, expected, actual)


def _at(evidence: Evidence, x: Array, shift: int) -> tuple[Array, Array]:
    """cos and sin of the build's own tables for x [B,S,R] or [B,H,S,R], at positions + shift."""
    tables = evidence.weight("cos"), evidence.weight("sin")
    rows = np.clip(evidence.inputs["positions"] + shift, 0, len(tables[0]) - 1)
    cos, sin = (table[rows] for table in tables)
    return (cos, sin) if x.ndim == 3 else (cos[:, None], sin[:, None])


def table_fault(rope: RopeConfig, cos_Pr: Array, sin_Pr: Array) -> tuple[str, str]:
    """Cause and text if the tables are those of another config, else empty."""
    width = 2 * cos_Pr.shape[1]
    frequencies = np.arctan2(sin_Pr[1], cos_Pr[1])
    sizes = np.hypot(cos_Pr[:SAMPLED], sin_Pr[:SAMPLED])
    angles = np.arange(len(sizes))[:, None] * frequencies
    if np.ptp(sizes) > 1e-4 or np.abs(cos_Pr[:SAMPLED] / sizes - np.cos(angles)).max() > 1e-3:
        return "", ""
    expected_turns, size = inverse_frequencies(rope, width), float(sizes.mean())
    if np.allclose(frequencies, expected_turns, rtol=1e-4, atol=0):
        if np.isclose(size, rope.table_multiplier, rtol=1e-4):
            return "", ""
        factors = f"{size:.6g}, not by {rope.table_multiplier:.6g}"
        return "rope_table_multiplier", f"cos and sin are multiplied by {factors}"
    for cause, text, other in _faulty_configs(rope):
        if np.allclose(frequencies, inverse_frequencies(other, width), rtol=1e-4, atol=0):
            return cause, f"the rope tables are those of {text}"
    pair = int(np.argmax(np.abs(frequencies / expected_turns - 1) > 1e-4))
    actual, expected = frequencies[pair], expected_turns[pair]
    text = f"from pair {pair} on, which turns by {actual:.6g} and not by {expected:.6g} a position"
    return "rope_frequencies", f"the rope tables' frequencies are off {text}"


SAMPLED = 8  # first positions, at which tables must turn evenly to be any config's


def _faulty_configs(rope: RopeConfig) -> Iterator[tuple[str, str, RopeConfig]]:
    """Cause, text and config of the mistakes that have been made."""
    for theta in (10_000.0, 50_000.0, 500_000.0, 1_000_000.0):
        if theta != rope.rope_theta:
            text = f"rope_theta {theta:g}, the config has {rope.rope_theta:g}"
            yield "rope_theta", text, replace(rope, rope_theta=theta)
            unscaled = replace(rope, rope_theta=theta, factor=1.0)
            yield "rope_theta", f"{text}, and of no YaRN", unscaled
    if rope.factor == 1.0:
        return
    yield "yarn_ramp", "no YaRN: its factor was left out", replace(rope, factor=1.0)
    text = f"every pair interpolated by {rope.factor:g}, where YaRN keeps the fast ones"
    yield "yarn_ramp", text, replace(rope, beta_fast=1e30, beta_slow=1e29)
    for fast, slow in ((32.0, 1.0), (1.0, 1.0), (rope.beta_slow, rope.beta_fast)):
        if (fast, slow) != (rope.beta_fast, rope.beta_slow):
            text = (
                f"beta_fast {fast:g} and beta_slow {slow:g}, the config has {rope.beta_fast:g} and "
                f"{rope.beta_slow:g}"
            )
            yield "yarn_ramp", text, replace(rope, beta_fast=fast, beta_slow=slow)
    for factor in (32.0, 40.0, 64.0):
        if factor != rope.factor:
            text = f"YaRN's factor {factor:g}, the config has {rope.factor:g}"
            yield "yarn_factor", text, replace(rope, factor=factor)


def inverse_frequencies(rope: RopeConfig, width: int) -> Array:
    """float64 [width/2], YaRN included (arXiv 2309.00071 §3.2); see export/reference/rope.py."""
    pairs = np.arange(width // 2)
    kept: Array = rope.rope_theta ** (-2.0 * pairs / width)
    if rope.factor == 1.0:
        return kept

    def correction(rotations: float) -> float:
        turns = rope.original_max_position_embeddings / (rotations * 2 * np.pi)
        return float(width * np.log(turns) / (2 * np.log(rope.rope_theta)))

    low = max(np.floor(correction(rope.beta_fast)), 0)
    high = min(np.ceil(correction(rope.beta_slow)), width - 1)
    ramp = np.clip((pairs - low) / (high - low if high != low else 0.001), 0, 1)
    blended: Array = kept / rope.factor * ramp + kept * (1 - ramp)
    return blended


def _halves(x: Array) -> Array:
    """Interleaved → half layout."""
    return np.concatenate([x[..., 0::2], x[..., 1::2]], axis=-1)


def _pairs(x: Array) -> Array:
    """Half layout → interleaved."""
    return np.stack(np.split(x, 2, axis=-1), axis=-1).reshape(x.shape)


def _rotated(half: Array, cos: Array, sin: Array) -> Array:
    """Half layout in and out."""
    first, second = np.split(half, 2, axis=-1)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def _pairwise(x: Array, cos: Array, sin: Array) -> Array:
    """Interleaved in and out."""
    return _pairs(_rotated(_halves(x), cos, sin))
