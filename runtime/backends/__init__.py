"""What runs the graphs: one protocol, one module per implementation."""

from collections.abc import Mapping, Sequence
from typing import Protocol

from graphs.config import BlockType
from graphs.tensorfile import Array


class Backend(Protocol):
    """Runs one graph at a time on arrays of the caller's; weights were bound when it was made."""

    def block(
        self,
        block: BlockType,
        layer: int,
        inputs: Mapping[str, Array],
        outputs: Mapping[str, Array],
    ) -> None:
        """Graph `dense` or `moe` with a layer's weights and the rope tables."""

    def experts(
        self,
        layer: int,
        chosen: Sequence[int],
        inputs: Mapping[str, Array],
        outputs: Mapping[str, Array],
    ) -> None:
        """Graph `experts`; `chosen` names the routed expert whose weights each slot reads."""

    def head(self, hidden: Array, logits: Array) -> None:
        """Graph `head`: hidden [M,D] fp32 → logits [M,vocab] fp32."""
