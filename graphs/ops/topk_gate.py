"""TopKGate(h_MD, weight_ED fp32, bias_E? fp32) → experts_MK int64, weights_MK fp32.

fp32 throughout. Scores are sigmoid or softmax of the logits; a bias, where there is one, takes part
in choosing, and the unbiased score weighs (DeepSeek-V3 §2.1.2). With several groups only the
experts of the `topk_group` best ones may be chosen: a group's score is the sum of its two best, or
its best. Experts of other groups get a large negative stand-in for −inf, never 0: with biased
scores below 0, a 0 would win.

The body writes sigmoid out as 1/(1 + exp(−x)): ONNX Runtime's own is a polynomial that is off by
0.6 % at −12, by half at −16, and 0 from −18 down, and a chosen expert's weight is such a score.
"""

from typing import TYPE_CHECKING

from graphs.contract.gates import BEST_OF_GROUP, GroupScore, Scoring
from graphs.ops import MASKED, CustomOp, Output, function_text

if TYPE_CHECKING:
    from torch import Tensor

_SCORES: dict[Scoring, str] = {
    "sigmoid": """
        one = Constant<value_float = 1.0>()
        negated = Neg(logits)
        inverse = Exp(negated)
        divisor_s = Add(inverse, one)
        scores = Reciprocal(divisor_s)
    """,
    "softmax": "scores = Softmax<axis = -1>(logits)",
}


def reference(
    h_MD: "Tensor",
    weight_ED: "Tensor",
    bias_E: "Tensor | None" = None,
    *,
    k: int,
    n_group: int,
    topk_group: int,
    group_score: GroupScore,
    scoring: Scoring,
    scaling: float,
    normalise: int,
) -> tuple["Tensor", "Tensor"]:
    import torch

    logits = h_MD.to(torch.float32) @ weight_ED.T
    scores = logits.sigmoid() if scoring == "sigmoid" else logits.softmax(dim=-1)
    choice = scores if bias_E is None else scores + bias_E
    if n_group > 1:
        grouped = choice.view(len(choice), n_group, -1)
        best = grouped.topk(BEST_OF_GROUP[group_score], dim=-1).values.sum(-1)
        kept = best.topk(topk_group, dim=-1).indices
        keep = torch.zeros_like(best, dtype=torch.bool).scatter(-1, kept, True)
        choice = torch.where(keep[..., None], grouped, MASKED).flatten(-2)
    experts = choice.topk(k, dim=-1).indices
    weights = scores.gather(-1, experts)
    if normalise:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return experts, weights * scaling


def outputs(
    h: "Tensor", weight: "Tensor", bias: "Tensor | None" = None, *, k: int, **attributes: object
) -> list[Output]:
    import torch

    return [((h.shape[0], k), torch.int64), ((h.shape[0], k), torch.float32)]


def body(
    inputs: int,
    *,
    k: int,
    n_group: int,
    topk_group: int,
    group_score: GroupScore,
    scoring: Scoring,
    scaling: float,
    normalise: int,
) -> str:
    lines = f"""
        last = Constant<value_ints = [-1]>()
        k = Constant<value_ints = [{k}]>()
        scaling = Constant<value_float = {scaling}>()
        wide = Cast<to = 1>(h)
        logits = Gemm<transB = 1>(wide, weight)
        {_SCORES[scoring]}
        biased = {"Add(scores, bias)" if inputs == 3 else "Identity(scores)"}
    """
    if n_group > 1:
        lines += f"""
        to_groups = Constant<value_ints = [0, {n_group}, -1]>()
        to_experts = Constant<value_ints = [0, -1]>()
        best_of = Constant<value_ints = [{BEST_OF_GROUP[group_score]}]>()
        kept_of = Constant<value_ints = [{topk_group}]>()
        barred = Constant<value_float = {MASKED}>()
        depth = Constant<value_int = {n_group}>()
        off_on = Constant<value_floats = [0.0, 1.0]>()
        middle = Constant<value_ints = [1]>()
        half = Constant<value_float = 0.5>()
        grouped = Reshape(biased, to_groups)
        best, best_at = TopK<axis = -1>(grouped, best_of)
        group_scores = ReduceSum<keepdims = 0>(best, last)
        kept, kept_at = TopK<axis = -1>(group_scores, kept_of)
        marks = OneHot<axis = -1>(kept_at, depth, off_on)
        mark = ReduceSum<keepdims = 0>(marks, middle)
        keep = Greater(mark, half)
        keep_column = Unsqueeze(keep, last)
        allowed = Where(keep_column, grouped, barred)
        choice = Reshape(allowed, to_experts)
        """
    else:
        lines += "choice = Identity(biased)\n"
    lines += "chosen_scores, experts = TopK<axis = -1>(choice, k)\n"
    lines += "unbiased = GatherElements<axis = -1>(scores, experts)\n"
    if normalise:
        lines += """
        tiny = Constant<value_float = 1e-20>()
        total = ReduceSum<keepdims = 1>(unbiased, last)
        divisor = Add(total, tiny)
        share = Div(unbiased, divisor)
        weights = Mul(share, scaling)
        """
    else:
        lines += "weights = Mul(unbiased, scaling)\n"
    return function_text(
        "TopKGate",
        "h, weight, bias" if inputs == 3 else "h, weight",
        "experts, weights",
        lines,
        attributes="k, n_group, topk_group, group_score, scoring, scaling, normalise",
    )


topk_gate = CustomOp("TopKGate", reference, outputs, body)
