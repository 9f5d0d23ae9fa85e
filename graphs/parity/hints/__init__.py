"""Likely causes of a case's first bad tap: a module per part of a block, a function per tap.

Each hypothesis is a fault that has been made; see `evidence` for when one is believed.
"""

from collections.abc import Callable, Iterable

from graphs.parity.compare import ReplayCase
from graphs.parity.findings import Hint, TapComparison, distinct, first_bad
from graphs.parity.hints.evidence import Evidence, make_hint
from graphs.parity.hints.gate import choice_hints, score_hints, sum_hints, weight_hints
from graphs.parity.hints.norms import norm_hints
from graphs.parity.hints.rope import layout_hints, rotation_hints
from graphs.parity.hints.scores import attention_hints, mix_hints
from graphs.parity.hints.weights import LINEARS, grid_hints

Diagnosis = Callable[[Evidence, str], list[Hint]]

BY_TAP: dict[str, tuple[Diagnosis, ...]] = {
    "x_attn": (norm_hints,),
    "c_q_normed": (norm_hints,),
    "h": (norm_hints,),
    "new": (norm_hints, rotation_hints),
    "k_pe": (layout_hints, grid_hints),
    "q_pe": (layout_hints, grid_hints),
    "q_pe_rotated": (rotation_hints,),
    "scores": (attention_hints,),
    "x_mid": (sum_hints,),
    "y": (sum_hints,),
    "acc": (sum_hints,),
    "gate_scores": (score_hints,),
    "experts": (choice_hints,),
    "expert_weights": (weight_hints,),
    "mix": (mix_hints,),
    **dict.fromkeys(LINEARS.keys() - {"k_pe", "q_pe"}, (grid_hints,)),
}


def diagnose(
    rows: Iterable[TapComparison],
    evidence_of: Callable[[str], Evidence],
    other_layer: Callable[[str], int | None],
) -> list[Hint]:
    """A hint per cause, for the first case that shows it.

    `other_layer`: the layer whose weights make a case pass, or None.
    """
    cases: dict[str, list[TapComparison]] = {}
    for row in rows:
        cases.setdefault(row.case, []).append(row)
    hints: list[Hint] = []
    for case, case_rows in sorted(cases.items()):
        bad = first_bad(case_rows)
        if bad is None or any(row.fed for row in case_rows) > bad.fed:
            continue  # a free run that fails where the fed one passes says nothing of a cause
        evidence = evidence_of(case)
        hints += _hints(evidence, bad) or _exchanged(evidence.case, bad, other_layer(case))
    return distinct(hints)


def _hints(evidence: Evidence, bad: TapComparison) -> list[Hint]:
    diagnoses = BY_TAP.get(bad.tap, ())
    if bad.tap.startswith("slots.") and not bad.tap.endswith(".product"):
        diagnoses = (grid_hints,)
    for diagnosis in diagnoses:
        if hints := diagnosis(evidence, bad.tap):
            return hints
    return []


def _exchanged(case: ReplayCase, bad: TapComparison, other: int | None) -> list[Hint]:
    if other is None:
        return []
    text = f"layer {bad.layer}'s weights lie in the file of layer {other}"
    evidence = "read from there, they bring every tap of the case within its limit"
    return [make_hint(case, bad.tap, "layers_exchanged", text, evidence)]
