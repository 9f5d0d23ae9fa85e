"""Faults of an RMSNorm: skipped, without its weight, or with another norm's epsilon.

The norms of the latent, of query and cache, have an epsilon of their own, whatever `rms_norm_eps`
says, and checkpoints with 1e-5 in place of 1e-6 tell them apart.
"""

from collections.abc import Iterator

import numpy as np

from graphs.contract.config import LATENT_NORM_EPS
from graphs.contract.tensorfile import Array
from graphs.parity.findings import Hint
from graphs.parity.hints.evidence import Candidate, Evidence

# tap → the norm's input, and the norm's weight
NORMS = {
    "x_attn": ("x", "attention.input_norm.weight"),
    "c_q_normed": ("c_q", "attention.q_norm.weight"),
    "new": ("c_kv", "attention.kv_norm.weight"),
    "h": ("x_mid", "post_norm.weight"),
}
LATENT = ("c_q_normed", "new")


def norm_hints(evidence: Evidence, tap: str) -> list[Hint]:
    """Hints on a norm's output; of `new`, on the latent columns alone."""
    source, weight = NORMS[tap]
    inputs = evidence.inputs
    before = inputs[source].astype(np.float64) if source in inputs else evidence.computed(source)
    actual, expected = evidence.computed(tap), evidence.expected(tap)
    width = before.shape[-1]
    actual, expected = actual[..., :width], expected[..., :width]
    before = before.reshape(actual.shape)
    block = evidence.config.rms_norm_eps
    eps, other_eps = (LATENT_NORM_EPS, block) if tap in LATENT else (block, LATENT_NORM_EPS)
    candidates = _candidates(tap, before, evidence.weight(weight), eps, other_eps)
    faultless = _normed(before, eps) * evidence.weight(weight)
    return evidence.best(tap, candidates, actual, expected, faultless)


def _candidates(
    tap: str, before: Array, weight: Array, eps: float, other_eps: float
) -> Iterator[Candidate]:
    kind = "latent norm" if tap in LATENT else "norm"
    yield Candidate("norm_skipped", f"the {kind} was skipped", before)
    yield Candidate("norm_skipped", f"the {kind} was skipped but for its weight", before * weight)
    normed = _normed(before, eps)
    yield Candidate("norm_unweighted", f"the {kind}'s weight was left out", normed)
    if other_eps != eps:
        owner = "the block's" if tap in LATENT else "the latent norms'"
        text = f"the {kind} has {owner} epsilon, {other_eps:g} in place of {eps:g}"
        yield Candidate("norm_eps", text, _normed(before, other_eps) * weight)


def _normed(x: Array, eps: float) -> Array:
    result: Array = x / np.sqrt(np.square(x).mean(axis=-1, keepdims=True) + eps)
    return result
