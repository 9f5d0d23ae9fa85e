"""A step's buffers, apart from weights and cache, allocated once for the largest step."""

from dataclasses import dataclass

import numpy as np

from graphs.contract.manifest import Profile
from graphs.contract.spec import BuildSpec
from graphs.contract.tensorfile import DTYPES, Array
from runtime.cache.strides import least_stride
from runtime.devices.base import Buffer, Device
from runtime.step.expert_routing import ExpertRouting


@dataclass(frozen=True)
class ResidualStream:
    """A residual stream: [M, D] for experts and head, [B, S, D] for blocks, in the same memory."""

    rows: Buffer
    tokens: Buffer


@dataclass(frozen=True)
class StepViews:
    """Buffers that a step's blocks read and write, for B sequences of S tokens, M = B·S."""

    streams: tuple[ResidualStream, ResidualStream]
    h: Buffer  # [M, D]
    experts: Buffer  # [M, K]
    gates: Buffer  # [M, K]
    new: list[Buffer]  # [B, S, W] of each layer


class StepBuffers:
    """M is the most rows of a step, rounded up so that every layer's staged rows are aligned.

    streams: two of fp32 [M, D], input and output in turn; h [M, D], in the activation's type;
    staged [layers, M, W], the new cache rows; positions int64 [M]; logits fp32, grown where a step
    needs more of them than the batch has sequences.
    """

    def __init__(self, device: Device, spec: BuildSpec, profile: Profile) -> None:
        """Raises DeviceError."""
        self.device, config = device, spec.config
        activation, fp32 = DTYPES[spec.cache_dtype][1], np.dtype(np.float32)
        D, M = config.hidden_size, most_rows(profile)
        self.vocab = config.vocab_size
        self.streams = [device.zeros((M, D), fp32) for _ in range(2)]
        self.h = device.zeros((M, D), activation)
        self.staged = device.zeros((config.num_hidden_layers, M, config.cache_width), activation)
        self.positions = device.zeros((M,), np.dtype(np.int64))
        self.routing = ExpertRouting(device, M, config.num_experts_per_tok)
        self._views: dict[tuple[int, int], StepViews] = {}
        self._rows = device.zeros((0, D), fp32)
        self._logits = device.zeros((0, self.vocab), fp32)
        self.head(max(profile.batch, 2))

    def written(self, buffer: Buffer, array: Array) -> Buffer:
        """The array, copied to the start of a flat buffer."""
        target = buffer[: array.size].reshape(array.shape)
        self.device.write(target, array)
        return target

    def staged_rows(self, B: int, S: int) -> Buffer:
        """[layers, B, S, W]: the cache rows that all blocks of a step wrote."""
        layers, _, W = self.staged.shape
        return self.staged[:, : B * S].reshape(layers, B, S, W)

    def views(self, B: int, S: int) -> StepViews:
        """Views for B sequences of S tokens, made once: on a GPU, making takes longer than use."""
        if (B, S) not in self._views:
            M = B * S
            rows = [stream[:M] for stream in self.streams]
            first, second = (ResidualStream(stream, stream.reshape(B, S, -1)) for stream in rows)
            experts, gates = self.routing.buffers(M)
            new = [layer[:M].reshape(B, S, -1) for layer in self.staged]
            self._views[B, S] = StepViews((first, second), self.h[:M], experts, gates, new)
        return self._views[B, S]

    def head(self, rows: int) -> tuple[Buffer, Buffer]:
        """The head's input fp32 [rows, D] and output [rows, vocab]. Raises DeviceError."""
        if rows > len(self._logits):
            fp32 = np.dtype(np.float32)
            self._rows = self.device.zeros((rows, self._rows.shape[1]), fp32)
            self._logits = self.device.zeros((rows, self.vocab), fp32)
        return self._rows[:rows], self._logits[:rows]


def most_rows(profile: Profile) -> int:
    """A step's most rows, at least two, rounded up to a multiple of the cache's 64."""
    return least_stride(1, max(profile.batch, profile.tokens, 2))


def buffer_bytes(spec: BuildSpec, profile: Profile) -> int:
    """Bytes of the device's memory for StepBuffers, without grown logits."""
    config, M = spec.config, most_rows(profile)
    item = DTYPES[spec.cache_dtype][1].itemsize
    hidden = M * config.hidden_size * (2 * 4 + item)
    staged = config.num_hidden_layers * M * config.cache_width * item
    small = M * (8 + 12 * config.num_experts_per_tok)
    head = max(profile.batch, 2) * 4 * (config.hidden_size + config.vocab_size)
    return hidden + staged + small + head
