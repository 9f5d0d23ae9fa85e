"""What runs the graphs: one protocol, one module per implementation."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from graphs.contract.config import BlockType
from graphs.contract.tensorfile import Array
from runtime.devices.base import Buffer, Device, Progress
from runtime.devices.weights import Weights


class BackendError(RuntimeError):
    """A run that failed; names graph and layer. What it was to write is not to be used."""


class ExpertSlot(NamedTuple):
    """One expert's share of a run of the experts graph: rows [R] int64, gates [R,1] fp32, R ≥ 1.

    Both lie on the host; rows are distinct.
    """

    expert: int
    rows: Array
    gates: Array


class Backend(Protocol):
    """Runs one graph at a time on buffers of the caller's; weights were bound when it was made.

    A block runs in one of two modes: decode, [B, 1] tokens, or prefill, [1, S]. No output may lie
    where an input does. A run that fails raises BackendError.
    """

    device: Device
    least_rows: int  # a row's result does not depend on what runs beside it from this many rows up
    scratch_bytes: int  # of the device, for all runs together

    def load_weights(self, weights: Weights, progress: Progress) -> None:
        """Bind all weights, once; runs are possible from then on. Raises DeviceError."""

    def block(
        self,
        block: BlockType,
        layer: int,
        inputs: Mapping[str, Buffer],
        outputs: Mapping[str, Buffer],
        group: int = 0,
    ) -> None:
        """Graph `dense` or `moe` with a layer's weights and the rope tables.

        `group` numbers the ranges of slots that a decode step is run in.
        """

    def experts(
        self,
        layer: int,
        groups: Sequence[Sequence[ExpertSlot]],
        h: Buffer,
        acc: Buffer,
        spare: Buffer,
    ) -> tuple[Buffer, Buffer]:
        """Graph `experts`, once per group of as many slots as it has.

        h, acc, spare: fp32 or bf16 [M,D], fp32 [M,D], fp32 [M,D]. Sums go from one of the last two
        to the other and back; returns the one that holds the sum, and the other.
        """

    def head(self, hidden: Buffer, logits: Buffer) -> None:
        """Graph `head`: hidden [M,D] fp32 → logits [M,vocab] fp32."""

    def close(self) -> None:
        """Save what makes the next start faster; the backend is not used afterwards."""
