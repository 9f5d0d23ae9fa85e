"""`python -m runtime bench`: every engine and step is measured, beside what it is held to."""

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import runtime.__main__ as command_line
from graphs.budget.gpus import find_gpu
from graphs.budget.traffic import chain_traffic, graph_traffic, roofline_seconds
from graphs.contract.manifest import Profile
from graphs.contract.spec import BuildSpec
from runtime.benchmark.bench import IN_A_ROW, BenchError, bench
from runtime.benchmark.cases import BenchCase, choose_cases, filled, usual_batches, usual_lengths
from runtime.benchmark.clocks import WARM_UP, measure
from runtime.benchmark.engines import engine_runs
from runtime.benchmark.measurements import BenchReport
from runtime.benchmark.roofline import Roofline, recognise
from runtime.benchmark.table import notes, number
from runtime.devices.base import DeviceError, HostDevice, no_progress
from runtime.devices.cuda import CudaDevice
from runtime.devices.weights import Weights
from runtime.step.chain import Chain
from tests.support.builds import Build, OpenChain
from tests.support.doubles.cuda import DriverDouble, GpuLostError
from tests.support.doubles.tensorrt import TensorRTDouble, open_double, write_double_engines

PROFILE = Profile(batch=2, tokens=8, context=256)
STEPS = [BenchCase(1, 1, 100), BenchCase(2, 1, 100), BenchCase(1, 8, 0), BenchCase(1, 8, 100)]
ROUNDS = 2


def rtx_5090() -> DriverDouble:
    """As its driver names it."""
    driver = DriverDouble()
    driver.name, driver.bandwidth = "NVIDIA GeForce RTX 5090", 1.79e12
    return driver


def on_double(
    build: Path, folder: Path, driver: DriverDouble | None = None, cache: int = 512
) -> tuple[Chain, TensorRTDouble]:
    spec = BuildSpec.load(build)
    weights = Weights.open(build, spec)
    backend, double = open_double(build, spec, PROFILE, folder, driver=driver or rtx_5090())
    backend.load_weights(weights, no_progress)
    return Chain(spec, weights, backend, PROFILE, cache), double


@pytest.fixture(scope="module")
def shared(nano: Build, tmp_path_factory: pytest.TempPathFactory) -> tuple[Chain, TensorRTDouble]:
    return on_double(nano("fp32"), tmp_path_factory.mktemp("double"))


@pytest.fixture
def doubled(shared: tuple[Chain, TensorRTDouble]) -> tuple[Chain, TensorRTDouble]:
    """For tests that plant no fault; nothing has run."""
    shared[1].runs.clear()
    return shared


@pytest.fixture
def faulty(nano: Build, tmp_path: Path) -> tuple[Chain, TensorRTDouble]:
    """For one test's faults."""
    return on_double(nano("fp32"), tmp_path)


def names(report: BenchReport) -> dict[tuple[str, str], list[dict[str, int]]]:
    """The sizes that were measured, by what and clock."""
    found: dict[tuple[str, str], list[dict[str, int]]] = {}
    for one in report.measurements:
        found.setdefault((one.what, one.clock), []).append(one.case)
    return found


def test_every_engine_and_the_chain_are_measured_in_every_case(open_chain: OpenChain) -> None:
    """On a real GPU too; wall and stream agree there, whichever is the longer of a sample."""
    chain = open_chain("fp32", PROFILE, cache=512)
    told: list[str] = []
    report = bench(chain, "some backend", [1, 2], [100], ROUNDS, told.append)
    blocks = [case.sizes for case in STEPS]
    rows = [{"batch": 1, "tokens": 1}, {"batch": 2, "tokens": 1}, {"batch": 1, "tokens": 8}]
    sizes = {"dense": blocks, "moe": blocks, "experts": rows, "chain": blocks}
    sizes["head"] = [{"batch": 1}, {"batch": 2}]
    gpu = chain.device.kind == "cuda"
    expected = {(what, "wall"): cases for what, cases in sizes.items()}
    if gpu:
        expected |= {(what, "stream"): cases for what, cases in sizes.items()}
        expected |= {(w, "launch"): cases for w, cases in sizes.items() if w != "chain"}
    assert names(report) == expected
    order = [m.what for m in report.measurements]
    assert list(dict.fromkeys(order)) == ["dense", "moe", "experts", "head", "chain"]
    assert sorted(told) == sorted(w for w, cases in sizes.items() for _ in cases)
    for found in report.measurements:
        assert found.by == "some backend"
        assert len(found.seconds) == ROUNDS and min(found.seconds) > 0
        assert (found.floor_seconds is not None) == (gpu and found.clock != "launch")
    for step, rate in zip(blocks, report.computed["tokens_per_second"], strict=True):
        wall = report.find("chain", "some backend", "wall", **step)
        assert rate["median"] == step["batch"] * step["tokens"] / wall.median
        assert (rate["at_best"] is None) == (not gpu)
    for step in blocks if gpu else []:  # of a sample, the stream's time is within the wall's
        wall = report.find("chain", "some backend", "wall", **step)
        stream = report.find("chain", "some backend", "stream", **step)
        assert all(a <= b for a, b in zip(stream.seconds, wall.seconds, strict=True))
    assert chain.cache.handles == [] and report.computed["left_out"] == []
    chain.cache.check()


def test_floors_are_those_of_the_budget(doubled: tuple[Chain, TensorRTDouble]) -> None:
    chain, _ = doubled
    report, config, gpu = bench(chain, "T", [1, 2], [100], 1), chain.config, find_gpu("rtx-5090")
    for case in STEPS:
        for graph in ("dense", "moe"):
            traffic = graph_traffic(config, graph, "fp32", **case.sizes)
            found = report.find(graph, "T", "stream", **case.sizes)
            assert found.floor_seconds == roofline_seconds(traffic, gpu)
        for clock in ("stream", "wall"):
            step = report.find("chain", "T", clock, **case.sizes)
            traffic = chain_traffic(config, "fp32", **case.sizes)
            assert step.floor_seconds == roofline_seconds(traffic, gpu)
    experts = graph_traffic(config, "experts", "fp32", batch=2, tokens=1, cached=0)
    found = report.find("experts", "T", "stream", batch=2, tokens=1)
    assert found.floor_seconds == roofline_seconds(experts, gpu)
    head = graph_traffic(config, "head", "fp32", batch=2, tokens=1, cached=0)
    assert report.find("head", "T", "stream", batch=2).floor_seconds == roofline_seconds(head, gpu)
    rate = report.computed["tokens_per_second"][1]
    step = report.find("chain", "T", batch=2, tokens=1, cached=100)
    assert step.floor_seconds and rate["at_best"] == 2 / step.floor_seconds


def test_layers_take_turns_also_from_sample_to_sample(
    doubled: tuple[Chain, TensorRTDouble], monkeypatch: pytest.MonkeyPatch
) -> None:
    """k2-nano has one dense layer and three MoE layers."""
    chain, double = doubled
    seen: list[tuple[str, int]] = []
    for name in ("block", "experts"):
        run = getattr(chain.backend, name)

        def spy(*arguments: Any, run: Callable[..., Any] = run, name: str = name) -> Any:
            block, layer = arguments[:2] if name == "block" else (name, arguments[0])
            seen.append((block, layer))
            return run(*arguments)

        monkeypatch.setattr(chain.backend, name, spy)
    bench(chain, "T", [1], [], 1)  # a prefill on nothing, alone
    alone = (WARM_UP + 1) * (1 + IN_A_ROW)
    layers = {what: [layer for w, layer in seen if w == what] for what in ("moe", "experts")}
    for what in ("moe", "experts"):
        assert layers[what][:alone] == [1 + n % 3 for n in range(alone)], what
    steps = WARM_UP + 1
    assert seen.count(("dense", 0)) == alone + steps
    assert double.runs["head"] == alone + steps


def test_every_step_of_a_case_begins_on_the_same_rows(
    doubled: tuple[Chain, TensorRTDouble], monkeypatch: pytest.MonkeyPatch
) -> None:
    chain, _ = doubled
    begun: list[tuple[list[int], list[int]]] = []
    step = chain.step

    def spy(tokens: list[list[int]]) -> object:
        begun.append((chain.cache.lengths, [len(new) for new in tokens]))
        return step(tokens)

    monkeypatch.setattr(chain, "step", spy)
    bench(chain, "T", [2], [100], ROUNDS)
    cases = [([100, 100], [1, 1]), ([0], [8]), ([100], [8])]
    assert begun == [case for case in cases for _ in range(WARM_UP + ROUNDS)]


def test_inputs_are_bound_as_in_a_step(doubled: tuple[Chain, TensorRTDouble]) -> None:
    """In the cache's own rows, of a common stride where there are several sequences."""
    chain, double = doubled
    for case, length in (
        (BenchCase(1, 1, 100), 100),
        (BenchCase(2, 1, 100), 128),
        (BenchCase(1, 8, 0), 0),
    ):
        mode = 0 if case.tokens == 1 else 1
        with filled(chain, case):
            context = next(
                c for c in double.contexts if c.engine.graph == "dense" and c.profile == mode
            )
            dense = next(iter(engine_runs(chain, case)))
            dense.run()
            chain.device.read(chain.buffers.positions)  # waits
            assert context.shapes["context"] == (case.batch, length, chain.config.cache_width)
            rows = chain.cache.context(0, 0, case.batch)
            assert context.addresses["context"] == chain.device.address(rows)
            positions = chain.device.read(chain.buffers.positions)[: case.rows]
            assert positions.tolist() == [case.cached + s for s in range(case.tokens)] * case.batch


@pytest.mark.parametrize("open_one", ["double", "host"])
def test_the_cache_is_filled_for_a_case_and_empty_after_it(
    nano: Build, tmp_path: Path, open_one: str, onnxruntime_backend: Any
) -> None:
    if open_one == "double":
        chain, _ = on_double(nano("fp32"), tmp_path)
    else:
        spec = BuildSpec.load(nano("fp32"))
        weights = Weights.open(nano("fp32"), spec)
        chain = Chain(spec, weights, onnxruntime_backend("fp32", PROFILE), PROFILE, 512)
    with pytest.raises(RuntimeError, match="planted"), filled(chain, BenchCase(2, 1, 100)):
        assert chain.cache.lengths == [100, 100] and chain.cache.stride == 128
        chain.cache.check()
        one, other = (chain.device.read(chain.cache.context(3, slot, 1))[0] for slot in range(2))
        assert (one == other).all() and 0.9 < one.std() < 1.1
        raise RuntimeError("planted")
    assert chain.cache.handles == []
    with filled(chain, BenchCase(1, 8, 0)):
        assert chain.cache.lengths == [0]


def test_cases_beyond_a_limit_are_left_out_with_the_reason(
    doubled: tuple[Chain, TensorRTDouble],
) -> None:
    chain, _ = doubled
    cases, left_out = choose_cases(chain, [1, 2, 3], [100, 255, 256])
    assert cases == [
        *(BenchCase(1, 1, 100), BenchCase(1, 1, 255), BenchCase(2, 1, 100), BenchCase(2, 1, 255)),
        *(BenchCase(1, 8, 0), BenchCase(1, 8, 100)),
    ]
    expected = {
        "1 × 1 on 256 cached rows": "context: expected at most 256, got 257",
        "3 × 1 on 100 cached rows": "batch: expected at most 2, got 3",
        "1 × 8 on 255 cached rows": "context: expected at most 256, got 263",
    }
    for case, why in expected.items():
        assert any(text.startswith(f"{case}: {why}") for text in left_out), (case, left_out)
    assert len(left_out) == 7


def test_too_small_a_cache_is_said_with_its_rows(nano: Build, tmp_path: Path) -> None:
    chain, _ = on_double(nano("fp32"), tmp_path, cache=192)
    cases, left_out = choose_cases(chain, [1, 2], [100])
    assert BenchCase(2, 1, 100) not in cases and len(left_out) == 1
    assert left_out[0].startswith("2 × 1 on 100 cached rows: ") and "192" in left_out[0]
    report = bench(chain, "T", [2], [100], 1)
    assert report.computed["left_out"] == left_out
    assert {m.case["batch"] for m in report.measurements} == {1}


def test_a_stride_beyond_the_profile_is_left_out(nano: Build, onnxruntime_backend: Any) -> None:
    """200 rows alone fit a context of 250; of two sequences the engine would read 256 each."""
    spec, profile = BuildSpec.load(nano("fp32")), Profile(batch=2, tokens=8, context=250)
    weights = Weights.open(nano("fp32"), spec)
    chain = Chain(spec, weights, onnxruntime_backend("fp32", profile), profile, 1024)
    cases, left_out = choose_cases(chain, [1, 2], [200])
    assert cases == [BenchCase(1, 1, 200), BenchCase(1, 8, 0), BenchCase(1, 8, 200)]
    assert left_out[0].startswith(
        "2 × 1 on 200 cached rows: context: expected at most 250, got 256"
    )


def test_what_is_measured_by_default_fits_the_profile() -> None:
    def usual(batch: int, tokens: int, context: int, positions: int = 9999) -> tuple[Any, Any]:
        profile = Profile(batch, tokens, context)
        chain: Any = SimpleNamespace(
            profile=profile, config=SimpleNamespace(max_position_embeddings=positions)
        )
        return usual_batches(chain), usual_lengths(chain)

    assert usual(8, 128, 4096) == ([1, 8], [1000, 3968])
    assert usual(1, 16, 256) == ([1], [240])
    assert usual(2, 16, 4096, positions=512) == ([1, 2], [496])
    assert usual(2, 300, 256) == ([1, 2], [0])


def test_a_sample_is_a_mean_of_runs_behind_one_that_keeps_the_gpu_busy() -> None:
    """Each takes the stream 2 ms, and the host 5 ms to launch."""
    device = CudaDevice(DriverDouble())
    launched: list[int] = []

    def run() -> None:
        launched.append(1)
        time.sleep(0.005)
        device.driver.submit(lambda: time.sleep(0.002))

    start = time.perf_counter()
    found = measure(device, run, rounds=3, in_a_row=4)
    seconds = time.perf_counter() - start
    assert len(launched) == (WARM_UP + 3) * 5
    assert set(found) == {"stream", "wall", "launch"}
    assert 5 * sum(found["wall"]) < seconds
    for stream, wall, launch in zip(*(found[c] for c in ("stream", "wall", "launch")), strict=True):
        assert stream >= 0.002 and launch >= 0.005
        assert 5 * wall >= 5 * launch + 4 * stream  # the double works when it is waited for


def test_the_host_has_one_clock_and_warm_up_does_not_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    deeds: list[str] = []
    now = iter(range(100))
    monkeypatch.setattr(time, "perf_counter", lambda: float(next(now)) ** 2)
    found = measure(
        HostDevice(), lambda: deeds.append("run"), 2, between=lambda: deeds.append("between")
    )
    assert deeds == ["run", "between"] * (WARM_UP + 2)
    starts = [3 * turn for turn in range(WARM_UP, WARM_UP + 2)]  # start, launched, end
    assert found == {"wall": tuple((s + 2.0) ** 2 - s**2 for s in starts)}


@pytest.fixture(params=["double", pytest.param("gpu", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> CudaDevice:
    return CudaDevice(DriverDouble()) if request.param == "double" else CudaDevice.open()


def test_work_on_the_stream_is_timed(device: CudaDevice) -> None:
    rows = device.zeros((1, 2**20, 16), np.dtype(np.float32))
    nothing = device.timed(lambda: None)
    moving = device.timed(lambda: device.move_rows(rows, 0, 2**19, 2**19))
    assert nothing is not None and moving is not None and 0 <= nothing < moving < 1


def test_an_event_has_no_time_before_the_stream_came_by() -> None:
    driver = DriverDouble()
    start, end = driver.event(), driver.event()
    with pytest.raises(RuntimeError, match="another stream"):
        start.record()
    driver.submit(start.record)
    driver.submit(lambda: time.sleep(0.01))
    driver.submit(end.record)
    with pytest.raises(RuntimeError, match="must be recorded"):
        start.elapsed_time(end)
    driver.wait()
    assert 10 <= start.elapsed_time(end) < 1000
    with pytest.raises(RuntimeError, match="end before the start"):
        end.elapsed_time(start)
    with pytest.raises(RuntimeError, match="must be recorded"):
        start.elapsed_time(driver.event())


def test_a_gpu_that_is_lost_while_it_is_timed_is_said() -> None:
    device = CudaDevice(DriverDouble())

    def lose() -> None:
        raise GpuLostError("planted")

    with pytest.raises(DeviceError, match=r"planted.*lost the GPU"):
        device.timed(lambda: device.driver.submit(lose))


@pytest.mark.parametrize(
    ("name", "sm", "bandwidth", "expected"),
    [
        ("NVIDIA H100 80GB HBM3", 90, 3.352e12, "h100"),
        ("NVIDIA H100 80GB HBM3", 90, 0, "h100"),
        ("NVIDIA H100 PCIe", 90, 2.039e12, None),
        ("NVIDIA H200", 90, 4.917e12, "h200"),
        ("NVIDIA B200", 100, 8.2e12, "b200"),
        ("NVIDIA GeForce RTX 5090", 120, 1.792e12, "rtx-5090"),
        ("NVIDIA GeForce RTX 5090 Laptop GPU", 120, 0.896e12, None),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", 120, 1.792e12, "rtx-pro-6000"),
        ("NVIDIA RTX 6000 Ada Generation", 89, 0.96e12, None),
        ("NVIDIA GeForce RTX 5090", 89, 1.792e12, None),
        ("Double RTX 6000", 120, 1e12, None),
    ],
)
def test_a_gpu_is_recognised_by_its_driver_s_name(
    name: str, sm: int, bandwidth: float, expected: str | None
) -> None:
    found = recognise(name, sm, bandwidth)
    assert (found and found.name) == expected


def test_a_gpu_of_no_table_has_its_driver_s_bandwidth_and_none_of_it_nothing() -> None:
    driver = DriverDouble()
    roofline = Roofline.find(CudaDevice(driver))
    assert roofline and roofline.gpu is None
    assert roofline.source == (
        "1,000 GB/s by the driver's memory clock and bus width, operations uncounted"
    )
    spec: Any = SimpleNamespace(bytes=5e9, flops={"fp32": 1e30})
    assert roofline.seconds(spec) == 0.005
    driver.bandwidth = 0.0
    assert Roofline.find(CudaDevice(driver)) is None
    assert Roofline.find(HostDevice()) is None


def test_a_floor_of_what_the_gpu_s_cache_holds_is_said_to_be_none() -> None:
    roofline = Roofline("a card", None, 1e12, cache_bytes=2**20)
    traffic: Any = SimpleNamespace(bytes=2**19)
    assert roofline.floor_of(traffic, 3) == "a card"
    assert roofline.floor_of(traffic, 2) == "a card; its L2 of 1 MB holds all that runs read"


@pytest.mark.parametrize("graph", ["dense", "moe", "experts", "head"])
def test_an_engine_that_fails_is_named_with_its_case(
    faulty: tuple[Chain, TensorRTDouble], graph: str
) -> None:
    chain, double = faulty
    double.plant(graph, 3, "refuse")
    expected = rf"^{graph}, 1 × 1 on 100 cached rows: engine {graph}, .* refused: .*planted fault"
    with pytest.raises(BenchError, match=expected):
        bench(chain, "T", [1], [100], 1)
    assert chain.cache.handles == []


def test_a_step_that_fails_is_named_with_its_case(faulty: tuple[Chain, TensorRTDouble]) -> None:
    chain, double = faulty
    double.plant("dense", (WARM_UP + 1) * (1 + IN_A_ROW) + 2, "refuse")
    with pytest.raises(BenchError, match=r"^chain, 1 × 1 on 100 cached rows: engine dense"):
        bench(chain, "T", [1], [100], 1)


def test_results_that_are_not_finite_are_no_measurement(
    faulty: tuple[Chain, TensorRTDouble],
) -> None:
    chain, double = faulty
    double.plant("head", (WARM_UP + 1) * (1 + IN_A_ROW), "logits")  # the last run
    with pytest.raises(BenchError, match=r"head, 1 × 1 on 100 .* expected finite results .*, got"):
        bench(chain, "T", [1], [100], 1)


Command = Callable[..., tuple[int, str, str]]


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Command:
    """`python -m runtime bench …` in this process: exit status and output."""

    def run(*arguments: str | Path) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["runtime", "bench", *map(str, arguments)])
        with pytest.raises(SystemExit) as left:
            command_line.main()
        return int(left.value.code or 0), *capsys.readouterr()

    return run


def test_the_command_shows_a_table_and_writes_every_sample(
    nano: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Command
) -> None:
    build = nano("fp32")
    folder = write_double_engines(build, BuildSpec.load(build), PROFILE, into=tmp_path)
    TensorRTDouble(rtx_5090()).install(monkeypatch)
    out = tmp_path / "bench.json"
    given = ("--backend", "tensorrt", "--engines", folder, "--out", out, "--rounds", "2")
    status, shown, errors = command(build, *given, "--cached", "100", "--sequences", "2")
    assert (status, errors) == (0, "")
    for text in ("NVIDIA GeForce RTX 5090", "launch", "2 × 1", "1 × 8", "× floor", "at best"):
        assert text in shown, text
    assert "floor: RTX 5090, 1,792 GB/s by its public figures" in shown
    found = json.loads(out.read_text())
    assert found["machine"]["device"] == "NVIDIA GeForce RTX 5090" and found["machine"]["sm"] == 120
    assert found["versions"]["profile"] == "b2t8c256" and found["versions"]["precision"] == "fp32"
    streams = [m for m in found["measurements"] if m["clock"] == "stream"]
    assert {m["what"] for m in streams} == {"dense", "moe", "experts", "head", "chain"}
    assert all(len(m["seconds"]) == 2 and m["floor_seconds"] > 0 for m in streams)
    assert {m["by"] for m in streams} == {"TensorRT"}
    assert [r["cached"] for r in found["computed"]["tokens_per_second"]] == [100, 0, 100]


def test_the_command_on_the_cpu_has_one_clock_and_no_floor(nano: Build, command: Command) -> None:
    limits = ("--batch", "1", "--chunk", "4", "--context", "64", "--cache", "64")
    status, shown, errors = command(nano("fp32"), "--threads", "1", "--rounds", "1", *limits)
    assert (status, errors) == (0, "")
    assert "wall" in shown and "floor " not in shown and "launch" not in shown
    assert "no floor: what this device could do at best is not known" in shown


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (("--cached", "9000"), "nothing to measure"),
        (("--out", "absent/bench.json"), "--out: expected a file in a folder that exists"),
        (("--cache", "9bananas"), "9bananas"),
    ],
)
def test_what_cannot_be_measured_is_one_line(
    nano: Build, command: Command, given: tuple[str, ...], expected: str
) -> None:
    limits = ("--batch", "1", "--chunk", "1", "--context", "64", "--threads", "1")
    status, shown, errors = command(nano("fp32"), *limits, *given)
    assert (status, shown, errors.count("\n")) == (1, "", 1)
    assert errors.startswith("error: ") and expected in errors


def test_numbers_have_three_digits_that_count() -> None:
    values = (0.000529, 0.0376, 1.0, 12.345, 99.95, 1816.54)
    shown = ["0.000529", "0.0376", "1.00", "12.3", "100.", "1,817"]
    assert [number(value) for value in values] == shown


def test_notes_tell_floors_apart(nano: Build, tmp_path: Path) -> None:
    """k2-nano's head is within the double's L2 of 1 MB; three MoE layers' weights are not."""
    chain, _ = on_double(nano("fp32"), tmp_path)
    report = bench(chain, "T", [1, 3], [100], 1)
    first, second, *left_out = notes(report)
    assert first == "floor: RTX 5090, 1,792 GB/s by its public figures"
    assert (
        second
        == f"floor*: {first.removeprefix('floor: ')}; its L2 of 1 MB holds all that runs read"
    )
    assert len(left_out) == 1 and left_out[0].startswith(
        "left out: 3 × 1 on 100 cached rows: batch"
    )
