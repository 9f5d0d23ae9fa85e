"""The chain: token ids through embedding, every block and the head, over the latent cache.

A step takes new tokens for a contiguous range of the cache's slots, in one of the two modes that an
engine has a profile for: decode, one token each of several sequences, or prefill, several tokens of
one. It checks every limit before anything runs, runs all blocks, and commits the new cache rows of
all layers when all of them have succeeded. A padded row is routed to no expert and never committed:
that of a sequence which brings no token to a decode step, and of one that stands beside a lone
token, where a backend would give one row a kernel of its own.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from graphs.contract.config import ModelConfig
from graphs.contract.manifest import Profile
from graphs.contract.spec import BuildSpec
from graphs.contract.tensorfile import DTYPES, Array
from runtime.backends import Backend, ExpertSlot
from runtime.cache.kv_cache import LatentCache
from runtime.cache.strides import least_stride
from runtime.devices.base import Buffer
from runtime.devices.weights import Weights
from runtime.step.buffers import StepBuffers
from runtime.step.expert_routing import expert_slots


class StepError(RuntimeError):
    """A step that was refused, or whose result was; the cache is as it was before."""


class LogitsError(StepError):
    """Logits that are not finite; `handle` is the sequence's."""

    def __init__(self, handle: int) -> None:
        super().__init__(f"sequence {handle}: logits hold NaN or infinity; nothing was committed")
        self.handle = handle


def require_ids(ids: Sequence[int], vocab_size: int) -> None:
    """Raises StepError where an id has no row in the embedding."""
    for token in ids:
        if not 0 <= token < vocab_size:
            raise StepError(f"token {token}: below vocab_size ({vocab_size}) expected")


class Chain:
    """A loaded build: spec, weights, backend and cache. Not thread-safe."""

    def __init__(
        self,
        spec: BuildSpec,
        weights: Weights,
        backend: Backend,
        profile: Profile,
        cache_rows: int,
    ) -> None:
        """`cache_rows` of each layer are rounded up to 64.

        Raises DeviceError where there is no memory for the cache or for what a step needs.
        """
        self.spec, self.config = spec, spec.config
        self.weights, self.backend, self.profile = weights, backend, profile
        self.device = backend.device
        self.activation = DTYPES[spec.cache_dtype][1]
        self.cache = LatentCache(
            self.device,
            self.config.num_hidden_layers,
            least_stride(1, cache_rows),
            self.config.cache_width,
            self.activation,
        )
        self.buffers = StepBuffers(self.device, spec, profile)

    def step(
        self, tokens: Sequence[Sequence[int]], first: int = 0, all_logits: bool = False
    ) -> list[Array]:
        """Run tokens[b] on slot first+b and commit their rows.

        Returns per sequence the logits fp32 [1, vocab] after its last token ([0, vocab] where it
        brought none), or of every token with `all_logits`. Raises StepError or CacheError before
        anything ran, BackendError where a run failed, NonFiniteError or LogitsError where a new row
        or a logit is not finite; the cache is then as it was.
        """
        counts = [len(t) for t in tokens]
        self._check(tokens, counts, first)
        self.cache.reserve(first, counts)
        batch = _Batch.make(self, tokens, counts, first)
        hidden = self._blocks(batch)
        logits = self._head(hidden, batch, all_logits)
        for handle, values in zip(self.cache.handles[first:], logits, strict=False):
            if not _all_finite(values):
                raise LogitsError(handle)
        staged = self.buffers.staged_rows(*batch.ids.shape)
        self.cache.commit(first, staged[:, : len(tokens)], tokens)
        return logits[: len(tokens)]

    def _check(self, tokens: Sequence[Sequence[int]], counts: list[int], first: int) -> None:
        handles, lengths = self.cache.handles, self.cache.lengths
        if not counts or not max(counts):
            raise StepError("a step needs at least one token")
        if first < 0 or first + len(counts) > len(handles):
            raise StepError(
                f"slots {first} to {first + len(counts) - 1} asked for, {len(handles)} in use"
            )
        if len(counts) > 1 and max(counts) > 1:
            raise StepError(
                f"one token each of several sequences, or several of one, expected, found {counts}:"
                " an engine has no other mode"
            )
        for ids in tokens:
            require_ids(ids, self.config.vocab_size)
        longest = max(n + c for n, c in zip(lengths[first:], counts, strict=False))
        self.require("batch", len(counts), self.profile.batch)
        self.require("tokens", max(counts), self.profile.tokens)
        self.require_length(longest)

    def require_length(self, rows: int) -> None:
        """Raises StepError where a sequence of so many rows is beyond profile or model."""
        self.require("context", rows, self.profile.context)
        limit = self.config.max_position_embeddings
        self.require("max_position_embeddings", rows, limit)

    def require(self, name: str, value: int, limit: int) -> None:
        """Raises StepError where a step would be beyond what engines and model were made for."""
        if value > limit:
            raise StepError(
                f"{name}: {value} asked for, the limit is {limit} (engines dense and moe, profile "
                f"{self.profile.name})"
            )

    def _blocks(self, batch: "_Batch") -> Buffer:
        """The residual stream fp32 [M, D] behind the last block; new rows are left in `staged`."""
        (B, S), buffers = batch.ids.shape, self.buffers
        views = buffers.views(B, S)
        x, spare = views.streams
        self.device.write(x.rows, self.weights.rows(batch.ids).reshape(B * S, -1))
        positions = buffers.written(buffers.positions, batch.positions)
        for layer in range(self.config.num_hidden_layers):
            block = self.config.block_type(layer)
            context = self.cache.context(layer, batch.first, B - batch.beside, batch.beside)
            inputs = {"x": x.tokens, "positions": positions, "context": context}
            outputs = {"new": views.new[layer]}
            if block == "dense":
                outputs["y"] = spare.tokens
                self.backend.block(block, layer, inputs, outputs, batch.group)
                x, spare = spare, x
            else:
                outputs |= {"acc": spare.rows, "h": views.h}
                outputs |= {"experts": views.experts, "expert_weights": views.gates}
                self.backend.block(block, layer, inputs, outputs, batch.group)
                groups = self._routed(batch)
                found, _ = self.backend.experts(layer, groups, views.h, spare.rows, x.rows)
                if found is spare.rows:
                    x, spare = spare, x
        return x.rows

    def _routed(self, batch: "_Batch") -> list[list[ExpertSlot]]:
        """Which rows go to which expert, as the block that ran last chose."""
        experts, gates = self.buffers.routing.read(batch.ids.size)
        least = self.backend.least_rows
        return list(expert_slots(experts, gates, batch.valid, self.spec.slots, least))

    def _head(self, hidden: Buffer, batch: "_Batch", all_logits: bool) -> list[Array]:
        S = batch.ids.shape[1]
        wanted = [
            np.arange(b * S + (0 if all_logits else max(count - 1, 0)), b * S + count)
            for b, count in enumerate(batch.counts)
        ]
        index = np.concatenate(wanted)
        count = len(index)
        lacking = max(self.backend.least_rows - count, 0)
        index = np.concatenate([index, np.repeat(index[-1:], lacking)])
        rows, logits = self.buffers.head(len(index))
        self.device.take(hidden, index, rows)
        self.backend.head(rows, logits)
        found = self.device.read(logits)[:count]
        return np.split(found, np.cumsum([len(w) for w in wanted])[:-1])


@dataclass(frozen=True)
class _Batch:
    """A step's inputs that are the same for every layer."""

    first: int
    counts: list[int]
    ids: Array  # [B, S]
    positions: Array  # [B, S]
    valid: Array  # [B·S]: not padding
    beside: int  # of the B, those that stand for no sequence
    group: int  # which range of slots, as wide as the profile's batch, it begins in

    @classmethod
    def make(
        cls, chain: Chain, tokens: Sequence[Sequence[int]], counts: list[int], first: int
    ) -> "_Batch":
        """Raises StepError where several sequences' stride is beyond the profile's context."""
        S, beside = max(counts), _beside(chain, counts, first)
        lengths = np.array(chain.cache.lengths[first : first + len(counts)] + [0] * beside)
        L = chain.cache.context(0, first, len(counts), beside).shape[1]
        counts = counts + [0] * beside
        B = len(counts)
        ids = np.zeros((B, S), np.int64)
        for b, sequence in enumerate(tokens):
            ids[b, : counts[b]] = sequence
        positions = step_positions(lengths, S, chain.config)
        chain.require("context", L, chain.profile.context)
        valid = np.arange(S) < np.array(counts)[:, None]
        group = first // chain.profile.batch if B > 1 else 0
        return cls(first, counts, ids, positions, valid.reshape(-1), beside, group)


def _all_finite(values: Array) -> bool:
    """By the least and the greatest, which NaN is where there is one: no array is made."""
    return bool(np.isfinite(values.min(initial=0)) and np.isfinite(values.max(initial=0)))


def _beside(chain: Chain, counts: list[int], first: int) -> int:
    """How many padded sequences a step gets: one for a lone token, where a backend asks for it.

    None where the cache has no place for it: such a token runs as it is.
    """
    cache = chain.cache
    lacking = max(counts) * len(counts) < chain.backend.least_rows
    fits = cache.has_room_beside(first) and cache.stride <= chain.profile.context
    return int(lacking and fits)


def step_positions(lengths: Array, S: int, config: ModelConfig) -> Array:
    """int64 [B, S]: those after `lengths` cached rows; padding stays within the rope table."""
    last = config.max_position_embeddings - 1
    positions: Array = np.minimum(lengths[:, None] + np.arange(S), last)
    return positions
