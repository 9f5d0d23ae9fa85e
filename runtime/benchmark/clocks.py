"""Seconds of a run by the wall clock, and by CUDA events where it is on a GPU."""

import time
from collections.abc import Callable

from runtime.benchmark.measurements import Clock
from runtime.devices.base import Device

WARM_UP = 2  # samples that do not count: TensorRT-RTX makes kernels, allocators grow


def measure(
    device: Device,
    run: Callable[[], object],
    rounds: int,
    in_a_row: int = 1,
    between: Callable[[], object] = lambda: None,
) -> dict[Clock, tuple[float, ...]]:
    """Samples of each clock, one a round, each the mean of `in_a_row` runs that nothing waits for.

    Several runs follow one more, whose time on the stream does not count: they are launched while
    the GPU is busy. `between` may undo a sample. Raises DeviceError, and what `run` does.
    """
    samples: list[dict[Clock, float]] = []
    for _ in range(WARM_UP + rounds):
        samples.append(_sample(device, run, in_a_row))
        between()
    counted = samples[WARM_UP:]
    return {clock: tuple(sample[clock] for sample in counted) for clock in counted[0]}


def _sample(device: Device, run: Callable[[], object], count: int) -> dict[Clock, float]:
    lead = int(count > 1)
    launched = 0.0

    def work() -> None:
        nonlocal launched
        for _ in range(count):
            run()
        launched = time.perf_counter()

    start = time.perf_counter()
    for _ in range(lead):
        run()
    stream = device.timed(work)
    wall = (time.perf_counter() - start) / (lead + count)
    if stream is None:
        return {"wall": wall}
    launch = (launched - start) / (lead + count)
    return {"stream": stream / count, "wall": wall, "launch": launch}
