"""The chain: token ids through embedding, every block and the head, over the latent cache.

A step takes new tokens for a contiguous range of the cache's slots, checks every limit before
anything runs, runs all blocks, and commits the new cache rows of all layers when all of them have
succeeded. Sequences may bring unequal numbers of tokens: shorter ones are padded; a padded row sees
only itself, is routed to no expert, and is never committed.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from graphs.config import ModelConfig
from graphs.manifest import Profile
from graphs.ops import MASKED
from graphs.spec import BuildSpec
from graphs.tensorfile import DTYPES, Array
from runtime.backends import Backend
from runtime.backends.onnxruntime import OnnxRuntimeBackend
from runtime.kv_cache import ROW_MULTIPLE, LatentCache, stride_for
from runtime.routing import add_experts, expert_slots
from runtime.weights import Weights


class StepError(RuntimeError):
    """A step that was refused, or whose result was; the cache is as it was before."""


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
        cache: LatentCache,
        profile: Profile,
    ) -> None:
        self.spec, self.config = spec, spec.config
        self.weights, self.backend, self.cache, self.profile = weights, backend, cache, profile
        M, c = profile.tokens, self.config
        self.activation = DTYPES[spec.cache_dtype][1]
        self.streams = [np.empty((M, c.hidden_size), np.float32) for _ in range(2)]
        self.h = np.empty((M, c.hidden_size), self.activation)
        self.chosen = np.empty((M, c.num_experts_per_tok), np.int64)
        self.gates = np.empty((M, c.num_experts_per_tok), np.float32)
        self.staged = np.empty((c.num_hidden_layers, M, c.cache_width), self.activation)

    @classmethod
    def load(
        cls,
        build: Path,
        profile: Profile | None = None,
        cache_rows: int | None = None,
        threads: int = 0,
        progress: Callable[[str], None] = lambda what: None,
    ) -> "Chain":
        """Open a build folder on ONNX Runtime. `cache_rows` a layer: by default the context limit.

        Raises BuildError where the folder is incomplete or damaged.
        """
        spec = BuildSpec.load(build)
        profile = profile or Profile()
        rows = profile.context if cache_rows is None else cache_rows
        weights = Weights.open(build, spec)
        backend = OnnxRuntimeBackend(build, spec, weights, threads, progress)
        cache = LatentCache(
            spec.config.num_hidden_layers,
            -(-rows // ROW_MULTIPLE) * ROW_MULTIPLE,
            spec.config.cache_width,
            DTYPES[spec.cache_dtype][1],
        )
        return cls(spec, weights, backend, cache, profile)

    def step(
        self, tokens: Sequence[Sequence[int]], first: int = 0, all_logits: bool = False
    ) -> list[Array]:
        """Run tokens[b] on slot first+b and commit their rows.

        Returns per sequence the logits fp32 [1, vocab] after its last token ([0, vocab] where it
        brought none), or of every token with `all_logits`. Raises StepError or CacheError before
        anything ran, and where a new row or a logit is not finite; the cache is then as it was.
        """
        counts = [len(t) for t in tokens]
        self._check(tokens, counts, first)
        self.cache.reserve([0] * first + counts)
        batch = _Batch.make(self, tokens, counts, first)
        hidden = self._blocks(batch)
        logits = self._head(hidden, batch, all_logits)
        for handle, values in zip(self.cache.slots.handles[first:], logits, strict=False):
            if not np.isfinite(values).all():
                raise StepError(
                    f"sequence {handle}: logits hold NaN or infinity; nothing was committed"
                )
        B, S = batch.ids.shape
        staged = self.staged[:, : B * S].reshape(len(self.staged), B, S, -1)
        self.cache.commit(first, staged, counts)
        return logits

    def _check(self, tokens: Sequence[Sequence[int]], counts: list[int], first: int) -> None:
        slots, profile = self.cache.slots, self.profile
        if not counts or not max(counts):
            raise StepError("a step needs at least one token")
        if first + len(counts) > len(slots.handles):
            raise StepError(
                f"slots {first} to {first + len(counts) - 1} asked for, {len(slots.handles)} in use"
            )
        for ids in tokens:
            require_ids(ids, self.config.vocab_size)
        lengths = slots.lengths[first : first + len(counts)]
        longest = max(n + count for n, count in zip(lengths, counts, strict=True))
        # several slots are bound with their whole stride as context
        context = longest if len(counts) == 1 else stride_for(longest)
        wanted = {
            "batch": (len(counts), profile.batch),
            "tokens": (len(counts) * max(counts), profile.tokens),
            "context": (context, profile.context),
            "max_position_embeddings": (longest, self.config.max_position_embeddings),
        }
        for name, (value, limit) in wanted.items():
            if value > limit:
                raise StepError(
                    f"{name}: {value} asked for, the limit is {limit} (engines dense and moe, "
                    f"profile {profile.name})"
                )

    def _blocks(self, batch: "_Batch") -> Array:
        """The residual stream fp32 [M, D] behind the last block; new rows go to `staged`."""
        B, S = batch.ids.shape
        M = B * S
        x, spare = (stream[:M] for stream in self.streams)
        x[:] = self.weights.rows(batch.ids).reshape(M, -1)
        for layer in range(self.config.num_hidden_layers):
            block = self.config.block_type(layer)
            inputs = {
                "x": x.reshape(B, S, -1),
                "positions": batch.positions,
                "mask": batch.mask,
                "context": self.cache.context(layer, batch.first, B),
            }
            outputs = {"new": self.staged[layer, :M].reshape(B, S, -1)}
            if block == "dense":
                outputs["y"] = spare.reshape(B, S, -1)
                self.backend.block(block, layer, inputs, outputs)
                x, spare = spare, x
            else:
                h, chosen, gates = self.h[:M], self.chosen[:M], self.gates[:M]
                outputs |= {"acc": spare, "h": h, "experts": chosen, "expert_weights": gates}
                self.backend.block(block, layer, inputs, outputs)
                groups = expert_slots(chosen, gates, batch.valid, self.spec.slots)
                x, spare = add_experts(self.backend, layer, groups, h, spare, x)
        return x

    def _head(self, hidden: Array, batch: "_Batch", all_logits: bool) -> list[Array]:
        S = batch.ids.shape[1]
        wanted = [
            np.arange(b * S + (0 if all_logits else max(count - 1, 0)), b * S + count)
            for b, count in enumerate(batch.counts)
        ]
        rows = np.concatenate(wanted)
        logits = np.empty((len(rows), self.config.vocab_size), np.float32)
        self.backend.head(hidden[rows], logits)
        return np.split(logits, np.cumsum([len(w) for w in wanted])[:-1])


@dataclass(frozen=True)
class _Batch:
    """A step's inputs that are the same for every layer."""

    first: int
    counts: list[int]
    ids: Array  # [B, S]
    positions: Array  # [B, S]
    mask: Array  # [B, L+S, 1, S] in the activation's type
    valid: Array  # [B·S]: not padding

    @classmethod
    def make(
        cls, chain: Chain, tokens: Sequence[Sequence[int]], counts: list[int], first: int
    ) -> "_Batch":
        B, S = len(counts), max(counts)
        lengths = np.array(chain.cache.slots.lengths[first : first + B])
        ids = np.zeros((B, S), np.int64)
        for b, sequence in enumerate(tokens):
            ids[b, : counts[b]] = sequence
        positions = step_positions(lengths, S, chain.config)
        L = chain.cache.context(0, first, B).shape[1]
        mask = step_mask(lengths, np.array(counts), S, L).astype(chain.activation)
        valid = np.arange(S) < np.array(counts)[:, None]
        return cls(first, counts, ids, positions, mask, valid.reshape(-1))


def step_positions(lengths: Array, S: int, config: ModelConfig) -> Array:
    """int64 [B, S]: those after `lengths` cached rows; padding stays within the rope table."""
    last = config.max_position_embeddings - 1
    positions: Array = np.minimum(lengths[:, None] + np.arange(S), last)
    return positions


def step_mask(lengths: Array, counts: Array, S: int, L: int) -> Array:
    """fp32 [B, L+S, 1, S], keys-major: 0 where query s of sequence b sees key t, else MASKED.

    A token sees its sequence's cached rows and the step's tokens up to itself; padding sees itself.
    """
    keys, queries = np.arange(S)[:, None], np.arange(S)[None, :]
    real = queries < counts[:, None, None]
    cached = (np.arange(L) < lengths[:, None])[:, :, None] & real
    own = np.where(real, keys <= queries, keys == queries)
    seen = np.concatenate([cached, own], axis=1)
    return np.where(seen, np.float32(0), np.float32(MASKED))[:, :, None, :]
