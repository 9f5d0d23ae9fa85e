"""Faults of routing: the score function, the choice, the weights; and a forgotten shared expert."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from graphs.contract.gates import BEST_OF_GROUP
from graphs.contract.tensorfile import Array
from graphs.parity.findings import Hint
from graphs.parity.hints.evidence import Candidate, Evidence, make_hint


def score_hints(evidence: Evidence, tap: str) -> list[Hint]:
    logits = evidence.computed("gate_logits")
    exponents = np.exp(logits - logits.max(axis=-1, keepdims=True))
    kinds = {
        "sigmoid": 1 / (1 + np.exp(-logits)),
        "softmax": exponents / exponents.sum(axis=-1, keepdims=True),
    }
    right = evidence.config.scoring_func
    candidates = [
        Candidate("scoring_func", f"gate scores are a {kind}, the config asks for {right}", scores)
        for kind, scores in kinds.items()
        if kind != right
    ]
    actual, expected = evidence.computed(tap), evidence.expected(tap)
    return evidence.best(tap, candidates, actual, expected, kinds[right])


def choice_hints(evidence: Evidence, tap: str) -> list[Hint]:
    """Hints on the chosen experts; a fault must explain every token's choice."""
    actual = np.sort(evidence.taps[tap], axis=-1)

    def explains(choice: Array) -> bool:
        order = np.argsort(-choice, axis=-1, kind="stable")
        return bool((np.sort(order[:, : actual.shape[1]], axis=-1) == actual).all())

    faultless, *faults = _choices(evidence)
    if explains(faultless[2]):
        return []
    for cause, text, choice in faults:
        if explains(choice):
            explained = f"this explains the choice of all {len(actual)} tokens"
            return [make_hint(evidence.case, tap, cause, text, explained)]
    return []


def _choices(evidence: Evidence) -> Iterator[tuple[str, str, Array]]:
    """Cause, text, and the scores [M,E] of which the largest are chosen; first without a fault."""
    c = evidence.config
    scores = evidence.computed("gate_scores")
    biased = scores + (evidence.weight("gate.bias") if c.has_gate_bias else 0.0)
    best = BEST_OF_GROUP[c.group_score or "max"]

    def grouped(choice: Array, best: int = best, barred: float = -np.inf) -> Array:
        return choice if c.n_group == 1 else _grouped(choice, c.n_group, c.topk_group, best, barred)

    yield "", "", grouped(biased)
    if c.n_group > 1:
        text = "experts of barred groups have the score 0, not −∞, and win over negative ones"
        yield "group_mask_zero", text, grouped(biased, barred=0.0)
        yield "groups_ignored", "experts were chosen from all groups", biased
        wrong_best = {1: 2, 2: 1}[best]
        text = f"a group is judged by its best {wrong_best}, not by its best {best}"
        yield "group_score", text, grouped(biased, wrong_best)
    if c.has_gate_bias:
        text = "experts were chosen without e_score_correction_bias"
        yield "correction_bias_ignored", text, grouped(scores)


def _grouped(choice: Array, groups: int, kept: int, best: int, barred: float) -> Array:
    """Scores with those of the groups that are not kept replaced."""
    grouped = choice.reshape(len(choice), groups, -1)
    scores = np.sort(grouped, axis=-1)[..., -best:].sum(axis=-1)
    order = np.argsort(-scores, axis=-1, kind="stable")
    keep = np.zeros(scores.shape, bool)
    np.put_along_axis(keep, order[:, :kept], True, axis=-1)
    return np.where(keep[..., None], grouped, barred).reshape(choice.shape)


@dataclass(frozen=True)
class _Rule:
    """How weights follow from scores [M,E]: divided by the chosen ones' sum or not, and scaled."""

    scores: Array
    normalised: bool
    scaling: float

    def weights(self, experts_MK: Array) -> Array:
        """Weights [M,E], 0 for experts that were not chosen, whatever the order of the chosen."""
        chosen = np.take_along_axis(self.scores, experts_MK, axis=-1)
        total = chosen.sum(axis=-1, keepdims=True) + 1e-20 if self.normalised else 1.0
        return _placed(experts_MK, chosen / total * self.scaling, self.scores.shape)


def weight_hints(evidence: Evidence, tap: str) -> list[Hint]:
    c, experts = evidence.config, evidence.taps["experts"]
    rule = _Rule(evidence.computed("gate_scores"), c.norm_topk_prob, c.expert_scaling)
    candidates = [
        Candidate(cause, text, fault.weights(experts))
        for cause, text, fault in _faulty_rules(evidence, rule)
    ]
    actual = _placed(experts, evidence.computed(tap), rule.scores.shape)
    reference = evidence.golden["output.experts"]
    expected = _placed(reference, evidence.expected(tap), rule.scores.shape)
    return evidence.best(tap, candidates, actual, expected, rule.weights(experts))


def _faulty_rules(evidence: Evidence, rule: _Rule) -> Iterator[tuple[str, str, _Rule]]:
    """Cause, text and rule of each fault."""
    if evidence.config.has_gate_bias:
        bias, scores = evidence.weights["gate.bias"], rule.scores.astype(np.float32)
        text = "expert weights are taken from the biased scores, not from the scores"
        yield "weights_from_biased_scores", text, replace(rule, scores=scores + bias)
        rebuilt = (scores + bias) - bias  # in fp32
        text = "expert weights are rebuilt as (score + bias) − bias, which rounds small scores away"
        yield "weights_rebuilt_from_biased_scores", text, replace(rule, scores=rebuilt)
    verb = "were not" if rule.normalised else "were"
    text = f"expert weights {verb} divided by their sum, against the config's norm_topk_prob"
    yield "norm_topk_prob", text, replace(rule, normalised=not rule.normalised)
    if rule.scaling != 1:
        text = f"expert weights lack the factor {rule.scaling:g} (routed_scaling_factor)"
        yield "routed_scaling", text, replace(rule, scaling=1.0)


def _placed(experts_MK: Array, weights_MK: Array, shape: tuple[int, ...]) -> Array:
    result = np.zeros(shape)
    np.put_along_axis(result, experts_MK, weights_MK, axis=-1)
    return result


def sum_hints(evidence: Evidence, tap: str) -> list[Hint]:
    """Hints on a sum onto the residual stream: which part was forgotten."""
    parts = {"x_mid": ("x", "delta_attn"), "y": ("x_mid", "delta_mlp"), "acc": ("x_mid", "shared")}
    actual, expected = evidence.computed(tap), evidence.expected(tap)
    first, second = (
        evidence.inputs[n].astype(np.float64) if n in evidence.inputs else evidence.computed(n)
        for n in parts[tap]
    )
    branch = {
        "x_mid": ("attention_forgotten", "the attention's output was not added"),
        "y": ("mlp_forgotten", "the feed-forward output was not added"),
        "acc": ("shared_expert_forgotten", "the shared expert's output was not added"),
    }[tap]
    candidates = [
        Candidate(*branch, first.reshape(actual.shape)),
        Candidate(
            "residual_forgotten", "the residual stream was not added", second.reshape(actual.shape)
        ),
    ]
    faultless = (first.reshape(-1) + second.reshape(-1)).reshape(actual.shape)
    return evidence.best(tap, candidates, actual, expected, faultless)
