"""The host's part of the mixture of experts: which rows go to which expert, in what order."""

from collections.abc import Iterator

import numpy as np

from graphs.contract.tensorfile import ALIGNMENT, Array
from runtime.backends import ExpertSlot
from runtime.devices.base import Buffer, Device


class ExpertRouting:
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
) -> Iterator[list[ExpertSlot]]:
    """Groups of exactly `slots` slots, experts ascending; rows that are not valid go to none.

    Ascending order makes a token's sum independent of its neighbours. Where experts run out, a slot
    gets row 0 with gate 0, which the graph turns into adding nothing; so does an expert that fewer
    than `least_rows` rows chose, with rows of others where there are any.
    """
    experts_N, gates_N = experts_MK[valid_M].reshape(-1), weights_MK[valid_M].reshape(-1)
    rows_N = valid_M.nonzero()[0].repeat(experts_MK.shape[1])
    if not len(rows_N):
        return
    if least_rows > 1:
        beside = _rows_beside(experts_N, rows_N, min(least_rows, len(valid_M)))
        experts_N, rows_N = np.append(experts_N, beside[0]), np.append(rows_N, beside[1])
        gates_N = np.append(gates_N, np.zeros(beside.shape[1], gates_N.dtype))
    order = experts_N.argsort(kind="stable")
    experts_N, rows_N, gates_N1 = experts_N[order], rows_N[order], gates_N[order][:, None]
    starts = [0, *((experts_N[1:] != experts_N[:-1]).nonzero()[0] + 1).tolist()]
    used = [
        ExpertSlot(expert, rows_N[start:end], gates_N1[start:end])
        for expert, start, end in zip(
            experts_N[starts].tolist(), starts, [*starts[1:], len(rows_N)], strict=True
        )
    ]
    for start in range(0, len(used), slots):
        group = used[start : start + slots]
        if lacking := slots - len(group):
            idle = ExpertSlot(group[0].expert, np.zeros(1, np.int64), np.zeros((1, 1), np.float32))
            group += [idle] * lacking
        yield group


def _rows_beside(experts_N: Array, rows_N: Array, most: int) -> Array:
    """int64 [2, N]: experts that fewer than `most` rows chose, and of the first rows what each
    lacks.
    """
    rows_of: dict[int, list[int]] = {}
    for expert, row in zip(experts_N.tolist(), rows_N.tolist(), strict=True):
        rows_of.setdefault(expert, []).append(row)
    pairs = [
        (expert, row)
        for expert, rows in rows_of.items()
        if len(rows) < most
        for row in [row for row in range(most) if row not in rows][: most - len(rows)]
    ]
    return np.array(pairs, np.int64).reshape(-1, 2).T
