"""Measures every engine alone and the whole chain, in every case that fits, against a floor."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np

from graphs.budget.traffic import Traffic, chain_traffic, graph_traffic
from graphs.contract.spec import GRAPHS
from runtime.backends import BackendError
from runtime.benchmark.cases import BenchCase, choose_cases, filled
from runtime.benchmark.clocks import measure
from runtime.benchmark.engines import EngineRun, engine_runs
from runtime.benchmark.machine import describe_machine, describe_versions
from runtime.benchmark.measurements import BenchReport, Clock, Measurement
from runtime.benchmark.roofline import Roofline
from runtime.cache.errors import CacheError
from runtime.devices.base import DeviceError
from runtime.step.chain import Chain, StepError

CHAIN = "chain"
IN_A_ROW = 8  # runs of an engine on a GPU, so that it need not wait for their launches

OnMeasured = Callable[[str], None]


class BenchError(RuntimeError):
    """Nothing to measure, or a failed run; names it."""


def bench(
    chain: Chain,
    by: str,
    batches: Sequence[int],
    lengths: Sequence[int],
    rounds: int,
    on_measured: OnMeasured = lambda what: None,
) -> BenchReport:
    """Measure a chain whose cache is empty; `by` names what runs its graphs. Raises BenchError.

    The report's `computed` has the cases that were left out, with reasons, and each whole step's
    tokens a second, with what the floor would allow.
    """
    cases, left_out = choose_cases(chain, batches, lengths)
    if not cases:
        raise BenchError(f"nothing to measure: {'; '.join(left_out) or 'no case given'}")
    runner = _Bench(chain, by, rounds, on_measured)
    for case in cases:
        with filled(chain, case):
            runner.engines(case)
            runner.steps(case)
    order = [*GRAPHS, CHAIN]
    measurements = sorted(runner.measurements, key=lambda m: order.index(m.what))  # cases stay
    computed: dict[str, Any] = {
        "tokens_per_second": [_rate(m) for m in measurements if _is_step(m)],
        "left_out": left_out,
    }
    return BenchReport(describe_machine(chain), describe_versions(chain), measurements, computed)


class _Bench:
    """The measurements so far."""

    def __init__(self, chain: Chain, by: str, rounds: int, on_measured: OnMeasured) -> None:
        self.chain, self.by, self.rounds, self.on_measured = chain, by, rounds, on_measured
        self.roofline = Roofline.find(chain.device)
        self.in_a_row = IN_A_ROW if chain.device.kind == "cuda" else 1
        self.measurements: list[Measurement] = []
        self._done: set[tuple[str, tuple[int, ...]]] = set()

    def engines(self, case: BenchCase) -> None:
        """Measure each engine not yet measured with the same sizes. Raises BenchError."""
        for engine in engine_runs(self.chain, case):
            key = engine.graph, tuple(engine.sizes.values())
            if key in self._done:
                continue
            self._done.add(key)
            with _named(engine.graph, case):
                seconds = measure(self.chain.device, engine.run, self.rounds, self.in_a_row)
                self._require_finite(engine)
            spec = self.chain.spec
            traffic = graph_traffic(spec.config, engine.graph, spec.precision, **case.sizes)
            self._add(engine.graph, engine.sizes, seconds, traffic, engine.layers)

    def steps(self, case: BenchCase) -> None:
        """Measure the whole chain; a step's rows are dropped again. Raises BenchError."""
        chain, spec = self.chain, self.chain.spec
        ids = np.random.default_rng(1).integers(
            spec.config.vocab_size, size=(case.batch, case.tokens)
        )
        tokens = ids.tolist()

        def back() -> None:
            for handle in chain.cache.handles:
                chain.cache.truncate(handle, case.cached)

        with _named(CHAIN, case):
            step = partial(chain.step, tokens)
            seconds = measure(chain.device, step, self.rounds, between=back)
        seconds.pop("launch", None)  # a step waits for the routing of every layer
        traffic = chain_traffic(spec.config, spec.precision, **case.sizes)
        self._add(CHAIN, case.sizes, seconds, traffic, 1)

    def _add(
        self,
        what: str,
        sizes: dict[str, int],
        seconds: Mapping[Clock, tuple[float, ...]],
        traffic: Traffic,
        layers: int,
    ) -> None:
        for clock, samples in seconds.items():
            floor = floor_of = None
            if self.roofline is not None and clock != "launch":
                floor = self.roofline.seconds(traffic)
                floor_of = self.roofline.floor_of(traffic, layers)
            self.measurements.append(
                Measurement(what, self.by, sizes, samples, floor, floor_of, clock)
            )
        self.on_measured(what)

    def _require_finite(self, engine: EngineRun) -> None:
        for buffer in engine.outputs:
            if not np.isfinite(self.chain.device.read(buffer)).all():
                raise BenchError("expected finite results of random inputs, got NaN or infinity")


@contextmanager
def _named(what: str, case: BenchCase) -> Iterator[None]:
    """Add to errors what was measured, and in which case."""
    try:
        yield
    except (BenchError, BackendError, DeviceError, StepError, CacheError) as e:
        raise BenchError(f"{what}, {case}: {e}") from e


def _is_step(m: Measurement) -> bool:
    return m.what == CHAIN and m.clock == "wall"


def _rate(step: Measurement) -> dict[str, Any]:
    count = step.case["batch"] * step.case["tokens"]
    at_best = None if step.floor_seconds is None else count / step.floor_seconds
    return step.case | {"median": count / step.median, "at_best": at_best}
