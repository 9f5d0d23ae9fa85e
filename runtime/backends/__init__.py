"""Backends run the graphs: one protocol, one module per implementation."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from graphs.contract.config import BlockType
from graphs.contract.tensorfile import Array
from runtime.devices.base import Buffer, Device, LoadProgress
from runtime.devices.weights import Weights


class BackendError(RuntimeError):
    """A failed run; names graph and layer. Its outputs are not to be used."""


class ExpertSlot(NamedTuple):
    """One expert's share of a run of the experts graph: rows [n] int64, gates [n,1] fp32, n ≥ 1.

    Both lie on the host; rows are distinct.
    """

    expert: int
    rows: Array
    gates: Array


class Backend(Protocol):
    """Runs one graph at a time on the caller's buffers; weights are bound once, beforehand.

    A block runs in one of two modes: decode, [B, 1] tokens, or prefill, [1, S]. No output may
    overlap an input. A run that fails raises BackendError.
    """

    device: Device
    least_rows: int  # from this many rows up, a row's result does not depend on its neighbours
    scratch_bytes: int  # of the device's memory, for all runs together

    def load_weights(self, weights: Weights, progress: LoadProgress) -> None:
        """Bind all weights, once; runs are possible from then on. Raises DeviceError."""

    def block(
        self,
        block: BlockType,
        layer: int,
        inputs: Mapping[str, Buffer],
        outputs: Mapping[str, Buffer],
        step_group: int = 0,
    ) -> None:
        """Graph `dense` or `moe` with a layer's weights and the rope tables.

        `step_group` numbers the ranges of cache slots that decode steps run on.
        """

    def experts(
        self,
        layer: int,
        runs: Sequence[Sequence[ExpertSlot]],
        h: Buffer,
        acc: Buffer,
        spare: Buffer,
    ) -> tuple[Buffer, Buffer]:
        """Graph `experts`, once per run; a run has as many expert slots as the graph.

        h, acc, spare: fp32 or bf16 [M,D], fp32 [M,D], fp32 [M,D]. Sums go from one of the last two
        to the other and back; returns the one that holds the sum, and the other.
        """

    def head(self, hidden: Buffer, logits: Buffer) -> None:
        """Graph `head`: hidden [M,D] fp32 → logits [M,vocab] fp32."""

    def close(self) -> None:
        """Save what makes the next start faster; the backend is not used afterwards."""
