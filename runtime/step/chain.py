"""The chain: token ids through embedding, every block and the head, over the latent cache.

A step takes new tokens for a contiguous range of the cache's slots, in one of the two modes that an
engine has a profile for: decode, one token each of several sequences, or prefill, several tokens of
one. It checks every limit before anything runs, runs all blocks, and commits the new cache rows of
all layers when all of them have succeeded. A padded row is routed to no expert and never committed:
that of a sequence which brings no token to a decode step, and of one that pads a lone token, where
a backend would give one row a kernel of its own.
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
    """A step that was refused, or whose result was refused; the cache is as before."""


class LogitsError(StepError):
    """Logits of sequence `handle` that are not finite."""

    def __init__(self, handle: int) -> None:
        super().__init__(f"sequence {handle}: logits hold NaN or infinity; nothing was committed")
        self.handle = handle


def require_ids(ids: Sequence[int], vocab_size: int) -> None:
    """Raises StepError where an id has no row in the embedding."""
    for token in ids:
        if not 0 <= token < vocab_size:
            raise StepError(f"token {token}: expected an id below vocab_size ({vocab_size})")


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
        """`cache_rows`, of each layer, is rounded up to a multiple of 64.

        Raises DeviceError where there is no memory for the cache or the step's buffers.
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
        """Run tokens[b] on cache slot first+b and commit their rows.

        Returns for each sequence the logits fp32 [1, vocab] after its last token ([0, vocab] where
        it brings none), or of every token with `all_logits`. Raises StepError or CacheError before
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
                f"cache slots: expected a range within the {len(handles)} in use, got {first} to "
                f"{first + len(counts) - 1}"
            )
        if len(counts) > 1 and max(counts) > 1:
            raise StepError(
                "tokens: expected one each of several sequences, or several of one, got "
                f"{counts}: an engine has no other mode"
            )
        for ids in tokens:
            require_ids(ids, self.config.vocab_size)
        longest = max(n + c for n, c in zip(lengths[first:], counts, strict=False))
        self.require("batch", len(counts), self.profile.batch)
        self.require("tokens", max(counts), self.profile.tokens)
        self.require_length(longest)

    def require_length(self, rows: int) -> None:
        """Raises StepError where profile or model admit no sequence of so many rows."""
        self.require("context", rows, self.profile.context)
        limit = self.config.max_position_embeddings
        self.require("max_position_embeddings", rows, limit)

    def require(self, name: str, value: int, limit: int) -> None:
        """Raises StepError where a value is above what engines or model admit."""
        if value > limit:
            raise StepError(
                f"{name}: expected at most {limit}, got {value} (engines dense and moe, profile "
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
            context = self.cache.context(layer, batch.first, B - batch.padding, batch.padding)
            inputs = {"x": x.tokens, "positions": positions, "context": context}
            outputs = {"new": views.new[layer]}
            if block == "dense":
                outputs["y"] = spare.tokens
                self.backend.block(block, layer, inputs, outputs, batch.step_group)
                x, spare = spare, x
            else:
                outputs |= {"acc": spare.rows, "h": views.h}
                outputs |= {"experts": views.experts, "expert_weights": views.gates}
                self.backend.block(block, layer, inputs, outputs, batch.step_group)
                runs = self._routed(batch)
                total, _ = self.backend.experts(layer, runs, views.h, spare.rows, x.rows)
                if total is spare.rows:
                    x, spare = spare, x
        return x.rows

    def _routed(self, batch: "_Batch") -> list[list[ExpertSlot]]:
        """Rows for each expert, as the block that ran last chose, in runs of the experts graph."""
        experts, gates = self.buffers.routing.read(batch.ids.size)
        least = self.backend.least_rows
        return list(expert_slots(experts, gates, batch.valid, self.spec.slots, least))

    def _head(self, hidden: Buffer, batch: "_Batch", all_logits: bool) -> list[Array]:
        S = batch.ids.shape[1]
        scored = [
            np.arange(b * S + (0 if all_logits else max(count - 1, 0)), b * S + count)
            for b, count in enumerate(batch.counts)
        ]
        index = np.concatenate(scored)
        count = len(index)
        lacking = max(self.backend.least_rows - count, 0)
        index = np.concatenate([index, np.repeat(index[-1:], lacking)])
        rows, logits = self.buffers.head(len(index))
        self.device.take(hidden, index, rows)
        self.backend.head(rows, logits)
        values = self.device.read(logits)[:count]
        return np.split(values, np.cumsum([len(rows) for rows in scored])[:-1])


@dataclass(frozen=True)
class _Batch:
    """A step's inputs that are the same for every layer."""

    first: int
    counts: list[int]
    ids: Array  # [B, S]
    positions: Array  # [B, S]
    valid: Array  # [B·S]: not padding
    padding: int  # how many of the B stand for no sequence
    step_group: int  # the range of cache slots, as wide as the profile's batch, that it begins in

    @classmethod
    def make(
        cls, chain: Chain, tokens: Sequence[Sequence[int]], counts: list[int], first: int
    ) -> "_Batch":
        """Raises StepError where several sequences' stride is beyond the profile's context."""
        S, padding = max(counts), _padding(chain, counts, first)
        lengths = np.array(chain.cache.lengths[first : first + len(counts)] + [0] * padding)
        L = chain.cache.context(0, first, len(counts), padding).shape[1]
        counts = counts + [0] * padding
        B = len(counts)
        ids = np.zeros((B, S), np.int64)
        for b, sequence in enumerate(tokens):
            ids[b, : counts[b]] = sequence
        positions = step_positions(lengths, S, chain.config)
        chain.require("context", L, chain.profile.context)
        valid = np.arange(S) < np.array(counts)[:, None]
        step_group = first // chain.profile.batch if B > 1 else 0
        return cls(first, counts, ids, positions, valid.reshape(-1), padding, step_group)


def _all_finite(values: Array) -> bool:
    """Checks the least and the greatest, which are NaN where any value is: no array is made."""
    return bool(np.isfinite(values.min(initial=0)) and np.isfinite(values.max(initial=0)))


def _padding(chain: Chain, counts: list[int], first: int) -> int:
    """How many padded sequences a step gets: 1 for a lone token where the backend needs two rows.

    0 where the cache has no room for it: such a token runs alone.
    """
    cache = chain.cache
    lacking = max(counts) * len(counts) < chain.backend.least_rows
    fits = cache.has_room_behind(first) and cache.stride <= chain.profile.context
    return int(lacking and fits)


def step_positions(lengths: Array, S: int, config: ModelConfig) -> Array:
    """int64 [B, S]: positions after `lengths` cached rows; padding stays within the rope table."""
    last = config.max_position_embeddings - 1
    positions: Array = np.minimum(lengths[:, None] + np.arange(S), last)
    return positions
