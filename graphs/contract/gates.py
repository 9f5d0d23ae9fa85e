"""The published ways to choose experts: each `topk_method` with the scores that it goes with."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from graphs.contract.rope_config import ConfigError, words

Scoring = Literal["sigmoid", "softmax"]
GroupScore = Literal["top2_sum", "max"]

# How many of an expert group's experts add up to its score.
BEST_OF_GROUP: dict[GroupScore, int] = {"top2_sum": 2, "max": 1}


@dataclass(frozen=True)
class GateMethod:
    """A `topk_method`. `group_score`: how a group of experts is scored; None: it knows no groups.

    `bias`: whether a correction bias takes part in choosing.
    """

    scoring_func: Scoring
    group_score: GroupScore | None
    bias: bool


# DeepSeek-V3 §2.1.2 (Kimi K2, Moonlight), DeepSeek-V2-Lite, DeepSeek-V2 §2.2.2.
METHODS: dict[str, GateMethod] = {
    "noaux_tc": GateMethod("sigmoid", "top2_sum", bias=True),
    "greedy": GateMethod("softmax", None, bias=False),
    "group_limited_greedy": GateMethod("softmax", "max", bias=False),
}

# What a model's published configuration class sets where config.json is silent, by model_type.
_V3 = {"scoring_func": "sigmoid", "topk_method": "noaux_tc"}
CLASS_DEFAULTS: dict[str, dict[str, str]] = {
    "kimi_k2": _V3,
    "deepseek_v3": _V3,
    "deepseek_v2": {"scoring_func": "softmax", "topk_method": "greedy"},
}


def with_gate_defaults(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """`raw` with what its model_type's configuration class would add.

    Raises ConfigError where a key is absent and no class is known: there is nothing to guess from.
    """
    kind = raw.get("model_type")
    full = {**(CLASS_DEFAULTS.get(kind, {}) if isinstance(kind, str) else {}), **raw}
    for field in _V3:
        if field not in full:
            raise ConfigError(
                f"{field}: missing, and its default is not known for model_type {kind!r}, only for "
                f"{words(tuple(CLASS_DEFAULTS))}; say it in config.json"
            )
    return full


def check_gate(
    topk_method: str, scoring_func: str, experts: int, groups: int, kept: int, chosen: int
) -> None:
    """Raises ConfigError. `kept` of the groups may serve a token, `chosen` experts do."""
    if topk_method not in METHODS:
        raise ConfigError(f"topk_method: expected {words(tuple(METHODS))}, got {topk_method!r}")
    method = METHODS[topk_method]
    if scoring_func != method.scoring_func:
        raise ConfigError(
            f"scoring_func: expected {method.scoring_func!r} with topk_method {topk_method!r}, got "
            f"{scoring_func!r}"
        )
    if experts % groups or kept > groups:
        raise ConfigError(
            f"n_group: expected a divisor of n_routed_experts ({experts}) that is at least "
            f"topk_group ({kept}), got {groups}"
        )
    if method.group_score is None and groups > 1:
        raise ConfigError(
            f"n_group: expected 1 with topk_method {topk_method!r}, which knows no groups, got "
            f"{groups}"
        )
    if method.group_score == "top2_sum" and groups > 1 and experts < 2 * groups:
        raise ConfigError(
            f"n_group: expected groups of at least 2 experts, got {groups} groups of {experts}: a "
            "group's score is the sum of its two best"
        )
    if chosen > experts // groups * kept:
        raise ConfigError(
            f"num_experts_per_tok: expected at most {experts // groups * kept}, the experts of "
            f"topk_group groups, got {chosen}"
        )
