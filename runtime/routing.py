"""The host's part of the mixture of experts: which rows go to which expert, in what order."""

from collections.abc import Iterator

import numpy as np

from graphs.tensorfile import ALIGNMENT, Array
from runtime.backends import Slot
from runtime.device import Buffer, Device


class Routing:
    """Where a MoE block writes its choice, in one buffer, so that one copy brings it to the host.

    experts: int64 [M,K]; gates: fp32 [M,K].
    """

    def __init__(self, device: Device, rows: int, chosen: int) -> None:
        self.device, self.chosen = device, chosen
        self.bytes = device.zeros((self._split(rows)[1],), np.dtype(np.uint8))

    def buffers(self, rows: int) -> tuple[Buffer, Buffer]:
        """experts and gates of a step of this many rows, on the device."""
        split, end = self._split(rows)
        count = rows * self.chosen
        experts = self.device.view(self.bytes[: 8 * count], np.dtype(np.int64))
        gates = self.device.view(self.bytes[split:end], np.dtype(np.float32))
        return experts.reshape(rows, self.chosen), gates.reshape(rows, self.chosen)

    def read(self, rows: int) -> tuple[Array, Array]:
        """The same on the host, when the block has run."""
        split, end = self._split(rows)
        found, count = self.device.read(self.bytes[:end]), rows * self.chosen
        experts = found[: 8 * count].view(np.int64).reshape(rows, self.chosen)
        return experts, found[split:].view(np.float32).reshape(rows, self.chosen)

    def _split(self, rows: int) -> tuple[int, int]:
        """Where the gates begin, on a 256-byte boundary, and where they end."""
        count = rows * self.chosen
        split = -(-8 * count // ALIGNMENT) * ALIGNMENT
        return split, split + 4 * count


def expert_slots(
    experts_MK: Array, weights_MK: Array, valid_M: Array, slots: int, least_rows: int = 1
) -> Iterator[list[Slot]]:
    """Groups of exactly `slots` slots, experts ascending; rows that are not valid go to none.

    Ascending order makes a token's sum independent of its neighbours. Where experts run out, a slot
    gets row 0 with gate 0, which the graph turns into adding nothing; so does an expert that fewer
    than `least_rows` rows chose, with rows of others where there are any.
    """
    most = min(least_rows, len(valid_M))
    by_expert: dict[int, tuple[list[int], list[float]]] = {}
    for row in np.flatnonzero(valid_M).tolist():
        for expert, gate in zip(experts_MK[row].tolist(), weights_MK[row].tolist(), strict=True):
            rows, gates = by_expert.setdefault(expert, ([], []))
            rows.append(row)
            gates.append(gate)
    used = []
    for expert, (rows, gates) in sorted(by_expert.items()):
        others = [r for r in range(most) if r not in rows][: max(most - len(rows), 0)]
        column = np.array(gates + [0.0] * len(others), np.float32)[:, None]
        used.append(Slot(expert, np.array(rows + others, np.int64), column))
    for start in range(0, len(used), slots):
        group = used[start : start + slots]
        idle = Slot(group[0].expert, np.zeros(1, np.int64), np.zeros((1, 1), np.float32))
        yield group + [idle] * (slots - len(group))
