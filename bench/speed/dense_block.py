"""A full-size dense block in one step: ours, and transformers' on the same weights and cache rows.

Ours is the chain's call of its backend for the first layer, recorded once and then repeated: the
same buffers and cache, without embedding, head and commit. The two sides and the machine's limit,
reading memory or multiplying, run in turns.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args
from unittest import mock

import numpy as np

from bench.speed.deepseek_v3 import AttentionKind, DeepseekLayer
from bench.speed.limits import MachineLimit
from graphs.budget.traffic import graph_traffic
from graphs.contract.manifest import Profile
from graphs.contract.tensorfile import Array
from runtime.backends import BackendError
from runtime.benchmark.cases import BenchCase, filled
from runtime.benchmark.measurements import Measurement, in_turns
from runtime.cache.strides import stride_for
from runtime.load import load_chain
from runtime.step.chain import Chain

OURS, INVARIANT = "ours", "ours, batch-invariant"
TRANSFORMERS = tuple(f"transformers {attention}" for attention in get_args(AttentionKind))
AGREEING = 5e-5  # the largest error; on 32,768 rows each side is up to 1.6e-5 from fp64
SETTLE = 0.02  # seconds between runs, for the threads of the one before to go to sleep


class SpeedError(RuntimeError):
    """Two sides that do not compute the same."""


@dataclass(frozen=True)
class MeasuredBlock:
    """The measured block: our build, the same weights in transformers, and both limits."""

    build: Path
    layer: DeepseekLayer
    reading: MachineLimit
    multiplying: MachineLimit
    threads: int

    def open(self, case: BenchCase, batch_invariant: bool) -> Chain:
        """A chain whose cache has room for the case, and for a padded sequence."""
        stride = stride_for(case.cached + case.tokens)
        profile = Profile(max(case.batch, 2), max(case.tokens, 2), stride)
        rows = max(case.batch, 2) * stride
        return load_chain(
            self.build,
            profile=profile,
            cache=rows,
            threads=self.threads,
            batch_invariant=batch_invariant,
        )


@dataclass(frozen=True)
class Compared:
    """`error`, max|a−b| / max|b|, is the largest of our outputs against theirs."""

    measurements: list[Measurement]
    error: float


def compare(subject: MeasuredBlock, case: BenchCase, rounds: int) -> Compared:
    """Time both sides in turns. Raises SpeedError where they do not agree."""
    with ExitStack() as stack:
        alone = stack.enter_context(our_step(subject, case, batch_invariant=False))
        steps = {OURS: alone.run}
        if case.rows == 1:
            steps[INVARIANT] = stack.enter_context(
                our_step(subject, case, batch_invariant=True)
            ).run
        for name, attention in zip(TRANSFORMERS, get_args(AttentionKind), strict=True):
            steps[name] = subject.layer.step(attention, alone.x, alone.rows)
        error = _agreement(steps, case)
        limit = subject.reading if case.tokens == 1 else subject.multiplying
        needed = alone.needed_bytes if case.tokens == 1 else alone.needed_flops
        runs: dict[str, Callable[[], object]] = {**steps, limit.by: limit.run}
        seconds = in_turns(runs, rounds, pause=SETTLE)
    sizes = case.sizes | {limit.unit: limit.count}
    at_most = Measurement(limit.what, limit.by, sizes, seconds[limit.by])
    rate = limit.count / at_most.median
    floor_of = f"{needed / 1e9:,.3f} G{limit.unit} at {rate / 1e9:,.1f} G{limit.unit}/s"
    measurements = [
        Measurement(kind_of(case), name, case.sizes, seconds[name], needed / rate, floor_of)
        for name in steps
    ]
    return Compared([*measurements, at_most], error)


def kind_of(case: BenchCase) -> str:
    return "decode" if case.tokens == 1 else "prefill"


def growth(
    subject: MeasuredBlock, in_use: int, cache_rows: Sequence[int], rounds: int
) -> list[Measurement]:
    """Time a whole step of the chain on `in_use` rows, in caches of several sizes, in turns."""
    with ExitStack() as stack:
        steps = {
            rows: stack.enter_context(_whole_step(subject, in_use, rows)) for rows in cache_rows
        }
        seconds = in_turns({str(rows): step for rows, step in steps.items()}, rounds, pause=SETTLE)
    return [
        Measurement("step", OURS, {"cached": in_use, "cache_rows": rows}, seconds[str(rows)])
        for rows in cache_rows
    ]


@contextmanager
def _whole_step(
    subject: MeasuredBlock, in_use: int, cache_rows: int
) -> Iterator[Callable[[], None]]:
    """A run of one token through the model, whose row is dropped again."""
    profile = Profile(batch=2, tokens=2, context=cache_rows)
    chain = load_chain(subject.build, profile=profile, cache=cache_rows, threads=subject.threads)
    with filled(chain, BenchCase(1, 1, in_use)):
        (handle,) = chain.cache.handles

        def run() -> None:
            chain.step([[0]])
            chain.cache.truncate(handle, in_use)

        yield run


@dataclass(frozen=True)
class OurStep:
    """`run` returns y [B,S,D], from x [B,S,D] and cached rows [B,L,W].

    `needed_bytes` are those that any implementation moves: weights, cached rows, new rows;
    `needed_flops` those of the absorbed form.
    """

    run: Callable[[], Array]
    x: Array
    rows: Array
    needed_bytes: int
    needed_flops: float


@contextmanager
def our_step(subject: MeasuredBlock, case: BenchCase, batch_invariant: bool) -> Iterator[OurStep]:
    chain = subject.open(case, batch_invariant)
    random = np.random.default_rng(0)
    ids = random.integers(0, chain.config.vocab_size, (case.batch, case.tokens))
    with filled(chain, case):
        call = _first_call(chain, ids.tolist())
        x, y = call[2]["x"][: case.batch].copy(), call[3]["y"][: case.batch]
        stride = chain.cache.stride
        rows = chain.cache.rows[0, : case.batch * stride].reshape(case.batch, stride, -1)
        rows = rows[:, : case.cached].copy()

        def run() -> Array:
            chain.backend.block(*call)
            return np.asarray(y)

        weights = sum(array.nbytes for array in chain.weights.layers[0].tensors.values())
        new = case.rows * chain.config.cache_width * rows.itemsize
        traffic = graph_traffic(chain.config, "dense", "fp32", **case.sizes)
        flops = sum(traffic.flops.values())
        yield OurStep(run, x, rows, weights + rows.nbytes + new, flops)


def _first_call(chain: Chain, ids: list[list[int]]) -> tuple[Any, ...]:
    """The arguments of a step's first call of `Backend.block`.

    The step ends there, as where a backend fails, so it has changed nothing.
    """
    block = mock.Mock(side_effect=BackendError("not run"))
    with mock.patch.object(chain.backend, "block", block), suppress(BackendError):
        chain.step(ids)
    called: tuple[Any, ...] = block.call_args.args
    return called


def _agreement(steps: Mapping[str, Callable[[], Array]], case: BenchCase) -> float:
    """The largest error of ours against theirs. Raises SpeedError."""
    outputs = {name: step().copy() for name, step in steps.items()}
    largest = 0.0
    for reference in TRANSFORMERS:
        for ours in steps.keys() - TRANSFORMERS:
            a, b = outputs[ours], outputs[reference]
            error = float(np.abs(a - b).max() / np.abs(b).max())
            if not error <= AGREEING:
                raise SpeedError(
                    f"{case}, {ours} against {reference}: expected max|a−b|/max|b| of at most "
                    f"{AGREEING}, got {error:.2e}"
                )
            largest = max(largest, error)
    return largest
