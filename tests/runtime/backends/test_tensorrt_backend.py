"""The TensorRT backend on the double: that it computes what ONNX Runtime does, how little it sets,
copies and allocates for it, and that no refusal is lost.
"""

import dataclasses
import itertools
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from graphs.contract.manifest import Compiler
from graphs.contract.spec import BuildSpec, GraphName
from graphs.contract.tensorfile import DTYPES, Array
from runtime.backends import BackendError, ExpertSlot
from runtime.backends.tensorrt import TensorRTBackend
from runtime.devices.base import DeviceError, no_progress
from runtime.devices.cuda import MOVED_AT_ONCE, CudaDevice
from runtime.devices.memory_plan import MemoryPlan
from runtime.devices.weights import Weights
from runtime.load import load_chain
from runtime.step.chain import Chain
from tests.support.builds import Build, OpenBackend
from tests.support.doubles import tensorrt as tensorrt_double
from tests.support.doubles.context import ContextDouble
from tests.support.doubles.cuda import DriverDouble
from tests.support.doubles.opened import FP32, PROFILE, Opened, run_graph
from tests.support.doubles.tensorrt import (
    EngineDouble,
    TensorRTDouble,
    open_double,
    write_double_engines,
)


@pytest.fixture
def opened(nano: Build, tmp_path: Path) -> Opened:
    return Opened(nano("fp32"), tmp_path)


def slots(M: int, experts: list[int]) -> list[list[ExpertSlot]]:
    """Groups of 8; each expert has other rows, as many as are left behind its number."""
    rng = np.random.default_rng(M)
    used = []
    for expert in experts:
        rows = np.arange(expert % M, M)
        used.append(ExpertSlot(expert, rows, rng.normal(size=(len(rows), 1)).astype(np.float32)))
    idle = ExpertSlot(experts[0], np.zeros(1, np.int64), np.zeros((1, 1), np.float32))
    used += [idle] * (-len(used) % 8)
    return [used[i : i + 8] for i in range(0, len(used), 8)]


def run_experts(backend: Any, M: int, groups: list[list[ExpertSlot]], layer: int = 2) -> Array:
    device, rng = backend.device, np.random.default_rng(M)
    D = backend.spec.config.hidden_size
    activation = DTYPES[backend.spec.cache_dtype][1]
    h, acc, spare = (
        device.zeros((M, D), activation),
        device.zeros((M, D), FP32),
        device.zeros((M, D), FP32),
    )
    device.write(h, rng.normal(size=(M, D)).astype(activation))
    device.write(acc, rng.normal(size=(M, D)).astype(np.float32))
    found, other = backend.experts(layer, groups, h, acc, spare)
    assert {backend.device.address(b) for b in (found, other)} == {
        backend.device.address(b) for b in (acc, spare)
    }
    total: Array = device.read(found)
    return total


STEPS = [(3, 1, 64), (1, 1, 7), (1, 1, 0), (1, 16, 0), (1, 5, 33), (4, 1, 256), (1, 2, 256)]


@pytest.mark.parametrize("precision", ["fp32", "fp8"])
def test_every_graph_gives_what_onnx_runtime_gives(
    nano: Build, tmp_path: Path, onnxruntime_backend: OpenBackend, precision: Any
) -> None:
    """Bit for bit: it is ONNX Runtime that computes, so what differs was bound wrongly."""
    ours, theirs = (
        Opened(nano(precision), tmp_path).backend,
        onnxruntime_backend(precision, PROFILE),
    )
    graphs: list[GraphName] = ["dense", "moe", "head"]
    for graph, (B, S, L) in itertools.product(graphs, STEPS):
        for layer in (1, 3):
            found = run_graph(ours, graph, B, S, L, layer)
            for name, expected in run_graph(theirs, graph, B, S, L, layer).items():
                assert found[name].tobytes() == expected.tobytes(), (graph, B, S, L, layer, name)
    for M, chosen in (1, [3]), (4, [0, 2, 5]), (16, [0, 1, 2, 3, 4, 5, 6, 7, 1, 3]), (5, [6] * 9):
        groups = slots(M, chosen)
        sums = [run_experts(backend, M, groups) for backend in (ours, theirs)]
        assert sums[0].tobytes() == sums[1].tobytes(), (M, chosen)


@pytest.mark.parametrize("compiler", ["rtx", "tensorrt"])
def test_both_flavours_say_the_same(
    nano: Build, tmp_path: Path, onnxruntime_backend: OpenBackend, compiler: Compiler
) -> None:
    one = Opened(nano("fp32"), tmp_path, compiler=compiler)
    assert one.double.__name__ == {"rtx": "tensorrt_rtx", "tensorrt": "tensorrt"}[compiler]
    found: list[list[list[list[int]]]] = []
    for backend in (one.backend, onnxruntime_backend("fp32", PROFILE)):
        chain = Chain(one.spec, one.weights, backend, PROFILE, 256)
        chain.cache.allocate()
        chain.cache.allocate()
        logits = [chain.step([list(range(40, 50))], slot)[0] for slot in (0, 1)]
        found.append([])
        for _ in range(4):
            ids = [[int(row[-1].argmax())] for row in logits]
            logits = chain.step(ids)
            found[-1].append(ids)
    assert found[0] == found[1]
    one.backend.close()
    assert bool(list(tmp_path.rglob("*.cache"))) == (compiler == "rtx")


def test_a_step_binds_only_what_moves(opened: Opened) -> None:
    """5 tensors of a dense block, 8 of a MoE block: weights and tables were bound once. Of shapes
    only those that are not the last run's.
    """
    moved: list[tuple[GraphName, int]] = [("dense", 5), ("moe", 8)]
    for graph, moving in moved:
        for B, S, L, shapes in (3, 1, 8, 3), (3, 1, 8, 0), (3, 1, 9, 1), (1, 5, 8, 3), (1, 5, 8, 0):
            calls = opened.counted(partial(run_graph, opened.backend, graph, B, S, L))
            assert calls.pop("set_input_shape", 0) == shapes
            assert calls == {"set_tensor_address": moving, "execute_async_v3": 1}
    assert opened.counted(lambda: run_graph(opened.backend, "head", 3, 1, 0)) == {
        "set_input_shape": 1,
        "set_tensor_address": 2,
        "execute_async_v3": 1,
    }


def test_one_context_per_layer_mode_and_group_of_slots(opened: Opened) -> None:
    layers = opened.spec.config.num_hidden_layers
    contexts = opened.double.contexts
    assert len(contexts) == 2 * layers + 2 + 2  # blocks; experts; head
    assert {c.scratch for c in contexts} == {contexts[0].scratch}
    assert [c.profile for c in contexts] == [0, 1] * (layers + 2)

    def block(B: int, S: int, group: int) -> None:
        backend, run = opened.backend, partial(opened.backend.block, step_group=group)
        with mock.patch.object(backend, "block", run):
            run_graph(backend, "moe", B, S, 8)

    for group, expected in (0, 0), (1, 1), (1, 0), (2, 1), (0, 0):
        before = len(contexts)
        block(3, 1, group)
        assert len(contexts) - before == expected
    new = contexts[-1]
    assert new.profile == 0 and set(new.addresses) == set(new.engine.tensors)
    block(1, 5, 3)  # prefill is one sequence: no groups
    assert len(contexts) == 2 * layers + 4 + 2


def test_rows_of_an_expert_go_to_the_gpu_in_one_copy(
    opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    writes: list[int] = []
    write = CudaDevice.write

    def counted(*arguments: Any) -> None:
        writes.append(arguments[2].nbytes)
        write(*arguments)

    monkeypatch.setattr(CudaDevice, "write", counted)
    groups = slots(16, [0, 1, 2, 3, 4, 5, 6, 7, 1, 3])
    before = opened.double.runs["experts"]
    calls = opened.counted(lambda: run_experts(opened.backend, 16, groups))
    assert len(groups) == opened.double.runs["experts"] - before == 2
    _, _, *rest = writes  # h and acc are the test's
    assert len(rest) == 1 and rest[0] % 256 == 0
    assert calls["execute_async_v3"] == 2
    found = run_experts(opened.backend, 3, [])  # nobody chose any: as it was
    assert len(writes) == 5 and np.isfinite(found).all()


def test_all_rows_that_a_step_can_choose_have_room(opened: Opened) -> None:
    """Every token of the largest step, by each of as many experts as it may choose."""
    config, allocations = opened.spec.config, opened.double.driver.allocations
    K, E = config.num_experts_per_tok, config.n_routed_experts
    rows = [np.arange(16)] * K + [np.zeros(1, np.int64)] * (E - K)
    gates = [np.ones((len(r), 1), np.float32) for r in rows]
    group = [ExpertSlot(e, r, g) for e, (r, g) in enumerate(zip(rows, gates, strict=True))]
    run_experts(opened.backend, 16, [group])
    assert opened.double.driver.allocations - allocations == 3  # h and the sums: the test's own
    assert opened.backend.scratch_bytes - opened.backend._engine_bytes < 2**13


def test_a_context_of_no_rows_is_bound_to_the_buffer_s_own_address(opened: Opened) -> None:
    backend, device = opened.backend, opened.backend.device
    chain = Chain(opened.spec, opened.weights, backend, PROFILE, 256)
    chain.cache.allocate()
    chain.cache.allocate()
    chain.step([[5, 6, 7]], 1)
    for layer, context in [(0, opened.double.contexts[1]), (2, opened.double.contexts[5])]:
        row = chain.cache.rows[layer, 64:]
        assert context.shapes["context"] == (1, 0, opened.spec.config.cache_width)
        assert context.addresses["context"] == device.address(row)


def test_graphs_of_rows_run_in_the_profile_that_admits_them(opened: Opened) -> None:
    experts, head = opened.double.contexts[-4:-2], opened.double.contexts[-2:]
    for M, mode in (1, 0), (4, 0), (5, 1), (16, 1):
        run_graph(opened.backend, "head", M, 1, 0)
        run_experts(opened.backend, M, slots(M, [1]))
        assert head[mode].shapes["hidden"][0] == experts[mode].shapes["h"][0] == M
    with pytest.raises(
        BackendError, match=r"engine head, profile prefill: shape \(17, 224\) of hid"
    ):
        run_graph(opened.backend, "head", 17, 1, 0)


def test_case_20_a_shape_beyond_the_profile_names_limit_engine_and_profile(
    opened: Opened,
) -> None:
    for (B, S, L), what in [
        (
            (5, 1, 8),
            r"engine moe, profile decode: shape \(5, 1, 224\) of x \(it admits \(1, 1, 224\) to "
            r"\(4, 1, 224\)\) refused: .*not in",
        ),
        ((1, 17, 8), r"profile prefill: shape \(1, 17, 224\) of x .* to \(1, 16, 224\)"),
        ((1, 1, 257), r"profile decode: shape \(1, 257, 144\) of context .* to \(4, 256, 144\)"),
    ]:
        with pytest.raises(BackendError, match=what):
            run_graph(opened.backend, "moe", B, S, L)


@pytest.mark.parametrize("graph", ["dense", "moe", "experts", "head"])
def test_a_run_that_is_refused_names_engine_layer_and_reason(
    opened: Opened, graph: GraphName
) -> None:
    def run() -> object:
        if graph == "experts":
            return run_experts(opened.backend, 3, slots(3, [1]))
        return run_graph(opened.backend, graph, 3, 1, 8)

    expected = run()
    of = {"dense": "layer 0", "moe": "layer 1", "experts": "layer 2", "head": "the model"}[graph]
    opened.double.plant(graph, 1, "refuse")
    with pytest.raises(BackendError) as e:
        run()
    assert str(e.value) == (
        f"engine {graph}, profile decode: a run of {of} refused: IExecutionContext: Error Code 3: "
        "a planted fault"
    )
    again = run()
    assert str(again) == str(expected)


def test_refusals_while_loading_are_errors(
    nano: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def planted(where: Any, name: str, what: Callable[..., Any], expected: str) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(where, name, what)
            with pytest.raises(BackendError, match=expected):
                Opened(nano("fp32"), tmp_path)

    def refuse(context: Any, *arguments: Any) -> bool:
        return bool(context._refuse("no"))

    planted(
        EngineDouble, "create_runtime_config", lambda self: None, "dense: create_runtime_config"
    )
    config = tensorrt_double.RuntimeConfigDouble
    planted(
        config, "set_runtime_cache", lambda *a: False, "dense: set_runtime_cache: TensorRT gave"
    )
    planted(
        EngineDouble, "create_execution_context", lambda *a: None, "dense: create_execution_context"
    )
    context = ContextDouble
    planted(context, "set_optimization_profile_async", refuse, "decode: the profile refused")
    planted(
        context, "set_device_memory", refuse, r"dense.*[0-9,]+ bytes of scratch refused: .*: no"
    )
    planted(
        context, "set_tensor_address", refuse, "dense, profile decode: address 0x.* of cos refused"
    )

    def no_runtime(logger: Any) -> None:
        raise TypeError("pybind11::init(): factory function returned nullptr")

    double: Any = TensorRTDouble()
    double.Runtime = no_runtime
    spec = BuildSpec.load(nano("fp32"))
    folder = write_double_engines(nano("fp32"), spec, PROFILE, into=tmp_path)
    with pytest.raises(BackendError, match=r"tensorrt_rtx 1.7.1.116: no runtime: TensorRT gave"):
        TensorRTBackend.open(nano("fp32"), spec, folder, double.device, trt=double)


def test_weights_are_uploaded_once_and_counted(nano: Build, tmp_path: Path) -> None:
    build = nano("fp8")
    spec = BuildSpec.load(build)
    weights = Weights.open(build, spec)
    backend, double = open_double(build, spec, PROFILE, tmp_path)
    free, allocations = double.device.free_bytes(), double.driver.allocations
    steps: list[tuple[int, int]] = []
    backend.load_weights(weights, lambda what, done, total: steps.append((done, total)))
    assert steps[-1] == (weights.device_bytes, weights.device_bytes)
    assert {total for _, total in steps} == {weights.device_bytes}
    done = [done for done, _ in steps]
    assert done == sorted(done) and len(set(done)) == len(done)
    layers = spec.config.num_hidden_layers
    assert double.driver.allocations - allocations == layers + 2 + 2  # head, rope; scratch, slots
    tensors = sum(len(f.tensors) for f in (*weights.layers, weights.head, weights.rope))
    taken = free - double.device.free_bytes() - weights.device_bytes - backend.scratch_bytes
    assert 0 <= taken <= 256 * (tensors + 2)


def test_out_of_memory_while_loading_leaves_nothing_behind(nano: Build, tmp_path: Path) -> None:
    build, driver = nano("fp32"), DriverDouble()
    spec = BuildSpec.load(build)
    backend, double = open_double(build, spec, PROFILE, tmp_path, driver=driver)
    weights, free = Weights.open(build, spec), double.device.free_bytes()
    driver.fails_at = driver.allocations + 5
    with pytest.raises(DeviceError, match=r"bytes needed, .* are free"):
        backend.load_weights(weights, no_progress)
    backend.load_weights(weights, no_progress)  # a retry
    assert np.isfinite(run_graph(backend, "moe", 3, 1, 8)["acc"]).all()
    del backend
    double.contexts.clear()
    double.device.wait()
    assert double.device.free_bytes() == free


def test_memory_that_does_not_do_is_said_with_the_sum() -> None:
    plan = MemoryPlan(free=1_000, weights=600, scratch=50, buffers=50)
    assert plan.left == 300
    plan.require(300)
    with pytest.raises(DeviceError) as e:
        plan.require(301)
    assert str(e.value) == (
        "weights 600 + scratch 50 + step buffers 50 + cache 301 = 1,001 bytes needed, 1,000 are "
        "free; it would take 2 with as much free"
    )
    big = dataclasses.replace(plan, weights=1_030_800)
    assert big.left < 0
    with pytest.raises(DeviceError, match="it would take 1146 with as much free"):
        big.require(0)
    with pytest.raises(DeviceError, match="more devices like this would not help"):
        MemoryPlan(free=100, weights=1, scratch=60, buffers=40).require(0)


def test_memory_is_counted_before_the_first_upload(
    nano: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build = shutil.copytree(nano("fp32"), tmp_path / "build")
    spec = BuildSpec.load(build)
    write_double_engines(build, spec, PROFILE)
    weights = Weights.open(build, spec).device_bytes
    room = weights + 3 * 2**20 + MOVED_AT_ONCE
    for total, expected in (room, ""), (weights, r"weights .* it would take \d+ with as much free"):
        double = TensorRTDouble(DriverDouble(total))
        double.install(monkeypatch)
        if not expected:
            chain = load_chain(build, backend="tensorrt")
            assert chain.profile == PROFILE
            assert chain.step([[1, 2]], chain.cache.slot(chain.cache.allocate()))[0].shape[0] == 1
            continue
        with pytest.raises(DeviceError, match=expected):
            load_chain(build, backend="tensorrt")
        assert double.driver.allocations == 1 and not double.calls  # what moves rows
