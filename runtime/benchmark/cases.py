"""The steps to measure, and a cache filled for one of them."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from runtime.cache.errors import CacheError
from runtime.cache.strides import least_stride
from runtime.step.chain import Chain, StepError

USUAL_LENGTH = 1000


@dataclass(frozen=True)
class BenchCase:
    """A step: the sequences, and for each its new tokens and its cached rows before them."""

    batch: int
    tokens: int
    cached: int

    @property
    def rows(self) -> int:
        """M."""
        return self.batch * self.tokens

    @property
    def sizes(self) -> dict[str, int]:
        return {"batch": self.batch, "tokens": self.tokens, "cached": self.cached}

    def __str__(self) -> str:
        return f"{self.batch} × {self.tokens} on {self.cached:,} cached rows"


def usual_batches(chain: Chain) -> list[int]:
    """Batches of one sequence and of as many as a step may have."""
    return sorted({1, chain.profile.batch})


def usual_lengths(chain: Chain) -> list[int]:
    """1,000 rows, and the most on which a prefill step of the profile's tokens still fits."""
    limit = min(chain.profile.context, chain.config.max_position_embeddings)
    most = max(limit - chain.profile.tokens, 0)
    return sorted({min(USUAL_LENGTH, most), most})


def choose_cases(
    chain: Chain, batches: Sequence[int], lengths: Sequence[int]
) -> tuple[list[BenchCase], list[str]]:
    """Decode of each batch on each length, and prefill on nothing and on each length.

    Returns also the cases beyond a limit, each with its reason.
    """
    tokens = chain.profile.tokens
    decode = [BenchCase(batch, 1, cached) for batch in batches for cached in lengths]
    prefill = [BenchCase(1, tokens, cached) for cached in (0, *lengths)] if tokens > 1 else []
    cases: list[BenchCase] = []
    left_out: list[str] = []
    for case in dict.fromkeys(decode + prefill):
        try:
            _require(chain, case)
        except (StepError, CacheError) as e:
            left_out.append(f"{case}: {e}")
        else:
            cases.append(case)
    return cases, left_out


def _require(chain: Chain, case: BenchCase) -> None:
    """Raises StepError or CacheError where a step of the case would be refused."""
    longest = case.cached + case.tokens
    chain.require("batch", case.batch, chain.profile.batch)
    chain.require_length(longest)
    chain.cache.require([longest] * case.batch)
    if case.batch > 1:
        chain.require("context", least_stride(case.batch, longest), chain.profile.context)


@contextmanager
def filled(chain: Chain, case: BenchCase) -> Iterator[None]:
    """Fill the cache with the case's sequences, of random rows, and room for its new tokens.

    All sequences have the same rows, each in its own cache slot.
    """
    cache = chain.cache
    first = cache.allocate()
    try:
        _append_random(chain, case.cached)
        for _ in range(case.batch - 1):
            cache.fork(first)
        cache.reserve(0, [case.tokens] * case.batch)
        yield
    finally:
        for handle in reversed(cache.handles):
            cache.free(handle)


def _append_random(chain: Chain, count: int) -> None:
    """Append rows to the sequence in cache slot 0, as many at a time as a step can stage."""
    staged, random = chain.buffers.staged, np.random.default_rng(0)
    rows = random.standard_normal(tuple(staged.shape), np.float32).astype(chain.activation)
    chain.device.write(staged, rows)
    for start in range(0, count, rows.shape[1]):
        piece = min(rows.shape[1], count - start)
        chain.cache.reserve(0, [piece])
        chain.cache.commit(0, chain.buffers.staged_rows(1, piece), [[0] * piece])
