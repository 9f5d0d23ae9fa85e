"""The host's part of the mixture of experts: assigns rows to experts, in a fixed order."""

from collections.abc import Iterator

import numpy as np

from graphs.contract.tensorfile import ALIGNMENT, Array
from runtime.backends import ExpertSlot
from runtime.devices.base import Buffer, Device


class ExpertRouting:
    """A MoE block's choice of experts in one buffer, so that one copy brings it to the host.

    experts: int64 [M,K]; gates: fp32 [M,K].
    """

    def __init__(self, device: Device, rows: int, chosen: int) -> None:
        self.device, self.chosen = device, chosen
        self.bytes = device.zeros((self._split(rows)[1],), np.dtype(np.uint8))

    def buffers(self, rows: int) -> tuple[Buffer, Buffer]:
        """Experts and gates of a step of this many rows, on the device."""
        split, end = self._split(rows)
        count = rows * self.chosen
        experts = self.device.view(self.bytes[: 8 * count], np.dtype(np.int64))
        gates = self.device.view(self.bytes[split:end], np.dtype(np.float32))
        return experts.reshape(rows, self.chosen), gates.reshape(rows, self.chosen)

    def read(self, rows: int) -> tuple[Array, Array]:
        """Experts and gates on the host, when the block has run."""
        split, end = self._split(rows)
        content, count = self.device.read(self.bytes[:end]), rows * self.chosen
        experts = content[: 8 * count].view(np.int64).reshape(rows, self.chosen)
        return experts, content[split:].view(np.float32).reshape(rows, self.chosen)

    def _split(self, rows: int) -> tuple[int, int]:
        """The bytes at which the gates begin, on a 256-byte boundary, and end."""
        count = rows * self.chosen
        split = -(-8 * count // ALIGNMENT) * ALIGNMENT
        return split, split + 4 * count


def expert_slots(
    experts_MK: Array, weights_MK: Array, valid_M: Array, slots: int, least_rows: int = 1
) -> Iterator[list[ExpertSlot]]:
    """Runs of exactly `slots` expert slots, experts ascending; rows that are not valid go to none.

    Ascending order makes a token's sum independent of its neighbours. Where experts run out, a slot
    gets row 0 with gate 0, which the graph turns into adding nothing. An expert that fewer than
    `least_rows` rows chose gets other rows with gate 0, where there are any.
    """
    experts, gates = experts_MK[valid_M].reshape(-1), weights_MK[valid_M].reshape(-1)
    rows = valid_M.nonzero()[0].repeat(experts_MK.shape[1])
    if not len(rows):
        return
    if least_rows > 1:
        fill_experts, fill_rows = _fill(experts, rows, min(least_rows, len(valid_M)))
        experts, rows = np.append(experts, fill_experts), np.append(rows, fill_rows)
        gates = np.append(gates, np.zeros(len(fill_rows), gates.dtype))
    order = experts.argsort(kind="stable")
    experts, rows, gates = experts[order], rows[order], gates[order][:, None]
    starts = [0, *((experts[1:] != experts[:-1]).nonzero()[0] + 1).tolist()]
    used = [
        ExpertSlot(expert, rows[start:end], gates[start:end])
        for expert, start, end in zip(
            experts[starts].tolist(), starts, [*starts[1:], len(rows)], strict=True
        )
    ]
    for start in range(0, len(used), slots):
        run = used[start : start + slots]
        if lacking := slots - len(run):
            idle = ExpertSlot(run[0].expert, np.zeros(1, np.int64), np.zeros((1, 1), np.float32))
            run += [idle] * lacking
        yield run


def _fill(experts: Array, rows: Array, least_rows: int) -> Array:
    """int64 [2, pairs]: experts that fewer than `least_rows` rows chose, and the first rows that
    did not choose them, as many as each lacks.
    """
    chosen_by: dict[int, list[int]] = {}
    for expert, row in zip(experts.tolist(), rows.tolist(), strict=True):
        chosen_by.setdefault(expert, []).append(row)
    pairs = [
        (expert, row)
        for expert, chosen in chosen_by.items()
        if len(chosen) < least_rows
        for row in [r for r in range(least_rows) if r not in chosen][: least_rows - len(chosen)]
    ]
    return np.array(pairs, np.int64).reshape(-1, 2).T
