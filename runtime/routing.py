"""The host's part of the mixture of experts: which rows go to which expert, in what order."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from graphs.tensorfile import Array
from runtime.backends import Backend


@dataclass(frozen=True)
class Slot:
    """One expert's share of a run of the experts graph: rows [R] int64, gates [R,1] fp32, R ≥ 1."""

    expert: int
    rows: Array
    gates: Array


def expert_slots(
    experts_MK: Array, weights_MK: Array, valid_M: Array, slots: int
) -> Iterator[list[Slot]]:
    """Groups of exactly `slots` slots, experts ascending; rows that are not valid go to none.

    Ascending order makes a token's sum independent of its neighbours. Where experts run out, a slot
    gets row 0 with gate 0, which the graph turns into adding nothing.
    """
    chosen = np.where(valid_M[:, None], experts_MK, -1)
    used = []
    for expert in np.unique(chosen[chosen >= 0]).tolist():
        rows, columns = np.nonzero(chosen == expert)
        used.append(Slot(expert, rows.astype(np.int64), weights_MK[rows, columns][:, None]))
    for start in range(0, len(used), slots):
        group = used[start : start + slots]
        idle = Slot(group[0].expert, np.zeros(1, np.int64), np.zeros((1, 1), np.float32))
        yield group + [idle] * (slots - len(group))


def add_experts(
    backend: Backend,
    layer: int,
    groups: Iterable[Sequence[Slot]],
    h_MD: Array,
    acc_MD: Array,
    spare_MD: Array,
) -> tuple[Array, Array]:
    """Run the experts graph once per group; returns the buffer that holds the sum, and the other.

    acc and spare are used in turn, since no output may lie where an input does.
    """
    for group in groups:
        inputs = {"h": h_MD, "acc": acc_MD}
        for index, slot in enumerate(group):
            inputs |= {f"rows_{index}": slot.rows, f"gates_{index}": slot.gates}
        backend.experts(layer, [slot.expert for slot in group], inputs, {"acc_out": spare_MD})
        acc_MD, spare_MD = spare_MD, acc_MD
    return acc_MD, spare_MD
