"""Faults of the attention scores: the mask, the scale, the parts."""

from collections.abc import Iterator

import numpy as np

from graphs.contract.config import ModelConfig
from graphs.contract.tensorfile import Array
from graphs.ops import MASKED
from graphs.parity.findings import Hint
from graphs.parity.hints.evidence import Candidate, Evidence
from graphs.parity.hints.masks import mask_hint
from graphs.parity.hints.weights import regrid_ratio, transposed


def attention_hints(evidence: Evidence, tap: str) -> list[Hint]:
    """Hints on the masked scores [B,H,S,T]."""
    actual, expected = evidence.computed(tap), evidence.expected(tap)
    masks = [scores[:, 0].transpose(0, 2, 1) for scores in (actual, expected)]
    cached = evidence.inputs["context"].shape[1]
    if hints := mask_hint(evidence.case, tap, masks[0], masks[1], cached):
        return hints
    seen = (actual > MASKED / 2) & (expected > MASKED / 2)
    w_uk = evidence.weight("attention.w_uk")
    content, position = _parts(evidence, w_uk)
    candidates = (
        Candidate(c.cause, c.text, c.predicted[seen])
        for c in _candidates(evidence.config, content, position)
    )
    faultless = (content + position) * evidence.config.softmax_scale
    if hints := evidence.best(tap, candidates, actual[seen], expected[seen], faultless[seen]):
        return hints
    ratio = regrid_ratio(evidence, "attention")
    if ratio is None:
        return []
    N = evidence.config.qk_nope_head_dim
    content, position = _parts(evidence, w_uk * ratio[:, :N])
    turned = (content + position) * evidence.config.softmax_scale
    candidate = transposed("kv_b_proj", turned[seen], fp8=False)
    return evidence.best(tap, [candidate], expected[seen], actual[seen])


def mix_hints(evidence: Evidence, tap: str) -> list[Hint]:
    """Hints on each head's mix [B,H,S,V], with probabilities that are right."""
    ratio = regrid_ratio(evidence, "attention")
    if ratio is None:
        return []
    N, C = evidence.config.qk_nope_head_dim, evidence.config.kv_lora_rank
    w_uv = evidence.weight("attention.w_uv") * ratio[:, N:].transpose(0, 2, 1)
    rows = _rows(evidence)[..., :C]
    latent = np.einsum("bhst,btc->bhsc", evidence.computed("probabilities"), rows)
    candidate = transposed("kv_b_proj", np.einsum("bhsc,hcv->bhsv", latent, w_uv), fp8=False)
    return evidence.best(tap, [candidate], evidence.expected(tap), evidence.computed(tap))


def _rows(evidence: Evidence) -> Array:
    """Cached and new rows [B,T,W]."""
    context = evidence.inputs["context"].astype(np.float64)
    return np.concatenate([context, evidence.computed("new")], axis=1)


def _parts(evidence: Evidence, w_uk: Array) -> tuple[Array, Array]:
    """Unscaled scores [B,H,S,T] of content and of position, from the graph's queries and rows."""
    rows, C = _rows(evidence), evidence.config.kv_lora_rank
    q_latent = np.einsum("bhsn,hnc->bhsc", evidence.computed("q_nope"), w_uk)
    content = np.einsum("bhsc,btc->bhst", q_latent, rows[..., :C])
    return content, np.einsum("bhsr,btr->bhst", evidence.computed("q_pe_rotated"), rows[..., C:])


def _candidates(c: ModelConfig, content: Array, position: Array) -> Iterator[Candidate]:
    """Scores with one fault, of the two unscaled parts."""
    plain, both = float(c.qk_head_dim) ** -0.5, content + position
    m2 = c.softmax_scale / plain
    scales = {
        "mscale2_missing": (plain, f"YaRN's mscale² ({m2:.6g}) is missing from the softmax scale"),
        "mscale_once": (plain * m2**0.5, "the softmax scale has mscale once, not squared"),
        "mscale2_twice": (plain * m2**2, f"the softmax scale has mscale² ({m2:.6g}) twice"),
    }
    if m2 != 1:
        for cause, (scale, text) in scales.items():
            yield Candidate(cause, text, both * scale)
    for name, width in (("qk_nope_head_dim", c.qk_nope_head_dim), ("kv_lora_rank", c.kv_lora_rank)):
        text = f"the softmax scale is of {name} ({width}), not of both parts ({c.qk_head_dim})"
        yield Candidate("softmax_scale", text, both * float(width) ** -0.5 * m2)
    yield Candidate("softmax_scale", "the scores are not scaled", both)
    text = "the rotated part is missing from the scores"
    yield Candidate("rope_part_missing", text, content * c.softmax_scale)
