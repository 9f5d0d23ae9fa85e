"""A backend that runs another one, and lets a function see and change what a block wrote."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from graphs.contract.tensorfile import Array
from runtime.backends import Backend, ExpertSlot
from runtime.devices.base import Buffer, LoadProgress
from runtime.devices.weights import Weights
from runtime.step.chain import Chain

Change = Callable[[int, "Block"], None]  # of a layer


class Block:
    """What a block read and wrote, as host arrays; what is put back is as if it had written it."""

    def __init__(
        self, backend: Backend, inputs: Mapping[str, Buffer], outputs: Mapping[str, Buffer]
    ):
        self._device, self._inputs, self._outputs = backend.device, inputs, outputs

    def read(self, name: str) -> Array:
        return self._device.read((dict(self._inputs) | dict(self._outputs))[name])

    def write(self, name: str, array: Array) -> None:
        self._device.write(self._outputs[name], array)

    def poison(self, name: str, index: Any, value: float = np.nan) -> None:
        array = self.read(name)
        array[index] = value
        self.write(name, array)


class Tampering:
    """See the module's docstring; `blocks` counts the runs."""

    def __init__(self, inner: Backend, change: Change) -> None:
        self.inner, self.change, self.blocks = inner, change, 0
        self.device, self.least_rows = inner.device, inner.least_rows
        self.scratch_bytes = inner.scratch_bytes

    def load_weights(self, weights: Weights, progress: LoadProgress) -> None:
        self.inner.load_weights(weights, progress)

    def block(
        self,
        block: Any,
        layer: int,
        inputs: Mapping[str, Buffer],
        outputs: Mapping[str, Buffer],
        group: int = 0,
    ) -> None:
        self.inner.block(block, layer, inputs, outputs, group)
        self.blocks += 1
        self.change(layer, Block(self.inner, inputs, outputs))

    def experts(
        self,
        layer: int,
        groups: Sequence[Sequence[ExpertSlot]],
        h: Buffer,
        acc: Buffer,
        spare: Buffer,
    ) -> tuple[Buffer, Buffer]:
        return self.inner.experts(layer, groups, h, acc, spare)

    def head(self, hidden: Buffer, logits: Buffer) -> None:
        self.inner.head(hidden, logits)

    def close(self) -> None:
        self.inner.close()


def tamper(chain: Chain, change: Change) -> Tampering:
    """From now on the chain's blocks are changed; `restore` undoes it."""
    chain.backend = tampering = Tampering(chain.backend, change)
    return tampering


def restore(chain: Chain) -> None:
    assert isinstance(chain.backend, Tampering)
    chain.backend = chain.backend.inner
