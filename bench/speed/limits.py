"""The machine's limits: reading memory and multiplying, both with the runs' threads.

A decode step cannot beat the reading, since it needs every weight once: in sequence, far beyond the
caches. A sum in numpy or numba reaches half of it; what reads fastest is a product of matrix and
vector, in the faster of its two forms, which differ by a few percent, one way or the other by
machine. A prefill of many tokens cannot beat the multiplying, of matrices that the caches hold.
"""

import statistics
from collections.abc import Callable
from dataclasses import dataclass

import torch

from runtime.benchmark.measurements import in_turns

COLUMNS = 65536
SIDE = 2048
TRIES = 5


@dataclass(frozen=True)
class MachineLimit:
    """`run` does `count` of `unit` once, as fast as the machine can."""

    by: str
    what: str
    unit: str
    count: int
    run: Callable[[], object]


def reading(size: int) -> MachineLimit:
    """Reading of `size` bytes, rounded down to whole rows of a matrix."""
    matrix = torch.ones(size // (COLUMNS * 4), COLUMNS)
    ones = torch.ones(max(matrix.shape))
    ways: dict[str, Callable[[], object]] = {
        "by row": lambda: torch.mv(matrix, ones[:COLUMNS]),
        "by column": lambda: torch.mv(matrix.T, ones[: len(matrix)]),
    }
    seconds = in_turns(ways, TRIES)
    fastest = ways[min(ways, key=lambda name: statistics.median(seconds[name]))]
    return MachineLimit("memory", "read", "B", matrix.nbytes, fastest)


def multiplying(side: int = SIDE) -> MachineLimit:
    """Multiplying two square fp32 matrices; a product and its sum are two operations."""
    a, b = torch.ones(side, side), torch.ones(side, side)
    return MachineLimit("arithmetic", "multiply", "FLOP", 2 * side**3, lambda: a @ b)
