"""What the double of TensorRT's runtime refuses, each fault planted alone in a run that is right.

The numbers are those of its docstring.
"""

import enum
import gc
import inspect
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from graphs.contract.manifest import Compiler, Profile
from graphs.contract.spec import BuildSpec, GraphName
from graphs.contract.tensorfile import DTYPES, Array
from graphs.engines.tensorrt import load_tensorrt
from runtime.devices.base import Buffer, DeviceError
from tests.support.builds import Build
from tests.support.doubles.context import ContextDouble
from tests.support.doubles.tensorrt import (
    DataType,
    EngineDouble,
    ExecutionContextAllocationStrategy,
    ILogger,
    RuntimeCacheDouble,
    RuntimeConfigDouble,
    RuntimeDouble,
    Severity,
    TensorIOMode,
    TensorRTDouble,
    write_double_engines,
)

PROFILE = Profile(batch=4, tokens=16, context=256)
SIZES = {
    "batch": 2, "tokens": 1, "context": 5, "rows": 3,
    **{f"rows_{i}": 1 for i in range(8)},
}  # fmt: skip


class Log(ILogger):
    def __init__(self) -> None:
        ILogger.__init__(self)
        self.errors: list[str] = []

    def log(self, severity: enum.Enum, msg: str) -> None:
        assert severity is Severity.ERROR
        self.errors.append(msg)


class Ready:
    """An engine and a context of it that lacks nothing to run: all inputs are zeros."""

    def __init__(self, build: Path, folder: Path, graph: GraphName, **engine: Any) -> None:
        self.double, self.log, spec = TensorRTDouble(), Log(), BuildSpec.load(build)
        self.device, self.spec = self.double.device, spec.graphs[graph]
        path = write_double_engines(build, spec, PROFILE, into=folder, **engine)
        self.file = (path / f"{graph}.engine").read_bytes()
        self.runtime = self.double.Runtime(self.log)
        self.engine: Any = self.runtime.deserialize_cuda_engine(self.file)
        if self.engine is None:
            return
        self.context = self.new_context()
        stream = self.double.driver.stream
        assert self.context.set_optimization_profile_async(0, stream)
        self.scratch = self.device.zeros((8192,), np.dtype(np.uint8))
        self.context.set_device_memory(self.device.address(self.scratch), 8192)
        self.buffers: dict[str, Buffer] = {}
        for tensor in (*self.spec.inputs, *self.spec.outputs):
            shape = tensor.shape(SIZES)
            self.buffers[tensor.name] = self.device.zeros(shape, DTYPES[tensor.dtype][1])
            self.bind(tensor.name, self.device.address(self.buffers[tensor.name]))
            if tensor.kind == "activation" and tensor in self.spec.inputs:
                assert self.context.set_input_shape(tensor.name, shape), self.log.errors

    def new_context(self) -> Any:
        return self.engine.create_execution_context(ExecutionContextAllocationStrategy.USER_MANAGED)

    def bind(self, name: str, address: int) -> bool:
        return bool(self.context.set_tensor_address(name, address))

    def run(self) -> bool:
        return bool(self.context.execute_async_v3(self.double.driver.stream))

    def read(self, name: str) -> Array:
        return self.device.read(self.buffers[name])

    def refused(self, done: object, why: str) -> None:
        assert not done
        assert why in self.log.errors[-1], self.log.errors


@pytest.fixture
def head(nano: Build, tmp_path: Path) -> Ready:
    return Ready(nano("fp32"), tmp_path, "head")


@pytest.mark.parametrize("graph", ["dense", "moe", "experts", "head"])
def test_a_run_that_lacks_nothing_runs_when_it_is_waited_for(
    nano: Build, tmp_path: Path, graph: GraphName
) -> None:
    ready = Ready(nano("fp8" if graph == "dense" else "fp32"), tmp_path, graph)
    ready.device.wait()
    for tensor in ready.spec.outputs:
        ready.buffers[tensor.name].fill_(7)
    assert ready.run(), ready.log.errors
    assert all((ready.buffers[tensor.name] == 7).all() for tensor in ready.spec.outputs)  # not yet
    for tensor in ready.spec.outputs:
        assert np.isfinite(ready.read(tensor.name).astype(np.float32)).all()
        assert not (ready.buffers[tensor.name] == 7).all()
    assert ready.log.errors == [] and ready.double.runs == {graph: 1}
    assert np.isnan(ready.device.read(ready.scratch[:4096]).view(np.float32)).all()
    assert not ready.device.read(ready.scratch[4096:]).any()  # another profile's


def test_an_engine_says_what_its_graph_says(head: Ready) -> None:
    engine = head.engine
    names = [engine.get_tensor_name(i) for i in range(engine.num_io_tensors)]
    assert set(names) == {t.name for t in (*head.spec.inputs, *head.spec.outputs)}
    assert engine.get_tensor_mode("logits") is TensorIOMode.OUTPUT
    assert engine.get_tensor_dtype("lm_head.weight") is DataType.FLOAT
    assert engine.get_tensor_shape("hidden") == (-1, 224)
    assert engine.get_tensor_profile_shape("hidden", 1) == [[1, 224], [16, 224], [16, 224]]
    assert engine.get_device_memory_size_for_profile_v2(0) < engine.device_memory_size_v2


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (ILogger, "ILogger"),
        (RuntimeDouble, "Runtime"),
        (EngineDouble, "ICudaEngine"),
        (RuntimeConfigDouble, "IRuntimeConfig"),
        (RuntimeCacheDouble, "IRuntimeCache"),
        (ContextDouble, "IExecutionContext"),
    ],
)
def test_methods_are_those_of_the_real_api(ours: type, theirs: str) -> None:
    """By name and parameters, as the installed TensorRT-RTX documents them."""
    real = getattr(load_tensorrt("rtx"), theirs)
    methods = {
        n: m for n, m in vars(ours).items() if inspect.isfunction(m) and not n.startswith("_")
    }
    for name, method in methods.items():
        parameters = list(inspect.signature(method).parameters)[1:]
        documented = getattr(real, name).__doc__
        signatures = re.findall(rf"^(?:\d+\. )?{name}\((.*)\) ->", documented, re.M)
        known = [re.findall(r"(?:^|, )(\w+): ", signature)[1:] for signature in signatures]
        assert parameters in known, name
    assert methods


def test_properties_and_enumerations_are_those_of_the_real_api() -> None:
    real = load_tensorrt("rtx")
    engine = ("num_io_tensors", "num_optimization_profiles", "device_memory_size_v2")
    config = ("cuda_graph_strategy", "dynamic_shapes_kernel_specialization_strategy")
    for owner, names in (real.ICudaEngine, engine), (real.IRuntimeConfig, config):
        assert all(isinstance(getattr(owner, name), property) for name in names)
    enums = [getattr(TensorRTDouble, name) for name in vars(TensorRTDouble)]
    enums = [e for e in enums if inspect.isclass(e) and issubclass(e, enum.Enum)]
    for ours in enums:
        theirs = getattr(real, ours.__name__).__members__
        assert {member.name for member in ours} <= set(theirs)
        assert ours is DataType or {m.name for m in ours} == set(theirs)
    assert {s.name for s in Severity} == set(real.ILogger.Severity.__members__)
    assert len(enums) == 6


def test_1_engine_files(nano: Build, tmp_path: Path, head: Ready) -> None:
    head.refused(head.runtime.deserialize_cuda_engine(head.file[1:]), "magicTag")
    others: list[tuple[dict[str, Any], str]] = [
        ({"version": "1.7.0"}, "version 1.7.0, 1.7.1.116 expected"),
        ({"sm": 89}, "sm 89, 120 expected"),
        ({"compiler": "tensorrt"}, "compiler tensorrt, rtx expected"),
    ]
    for changed, why in others:
        ready = Ready(nano("fp32"), tmp_path, "head", **changed)
        ready.refused(ready.engine, why)


def test_2_unknown_tensors(head: Ready) -> None:
    head.refused(head.bind("hiden", 256), "no tensor 'hiden'")
    head.refused(head.context.set_input_shape("hiden", (1, 224)), "no input 'hiden'")
    head.refused(head.context.set_input_shape("logits", (1, 258)), "no input 'logits'")


def test_3_shapes(head: Ready) -> None:
    for shape, why in [
        ((3, 224, 1), "2 dimensions"),
        ((3, 223), "not in"),
        ((0, 224), "not in"),
        ((5, 224), "not in"),
    ]:
        head.refused(head.context.set_input_shape("hidden", shape), why)
    assert head.context.set_optimization_profile_async(1, head.double.driver.stream)
    head.refused(head.run(), "hidden: shape not set")  # the other profile's is forgotten
    assert head.context.set_input_shape("hidden", (5, 224))


def test_4_addresses(head: Ready) -> None:
    for address in 0, head.device.address(head.buffers["hidden"]) + 128:
        head.refused(head.bind("hidden", address), "misaligned address")


def test_5_profiles(head: Ready) -> None:
    switch, stream = head.context.set_optimization_profile_async, head.double.driver.stream
    head.refused(switch(2, stream), "profile 2 of 2")
    head.refused(switch(-1, stream), "profile -1 of 2")
    head.refused(switch(1, 0), "no stream 0")
    head.refused(head.context.execute_async_v3(0), "no stream 0")


def test_6_scratch_memory(head: Ready) -> None:
    address = head.device.address(head.scratch)
    fresh = head.new_context()
    fresh.set_optimization_profile_async(1, head.double.driver.stream)
    for place, size, why in [(address, 8191, "8192 needed"), (address + 1, 8192, "misaligned")]:
        assert fresh.set_device_memory(place, size) is None
        assert why in head.log.errors[-1]
    fresh.addresses, fresh.shapes = head.context.addresses, head.context.shapes
    head.refused(fresh.execute_async_v3(head.double.driver.stream), "no device memory set")
    head.context.set_device_memory(2**40, 8192)
    head.refused(head.run(), "scratch: 4096 bytes at 0x10000000000 are not allocated")


def test_7_what_is_unset(head: Ready) -> None:
    stream, set_up = head.double.driver.stream, head.context
    for lacking, why in [
        ("profile", "no optimization profile set"),
        ("hidden shape", "hidden: shape not set"),
        ("lm_head.weight", "lm_head.weight: address not set"),
        ("logits", "logits: address not set"),
    ]:
        context = head.new_context()
        if lacking == "profile":
            head.refused(context.set_input_shape("hidden", (3, 224)), "no profile set")
        else:
            assert context.set_optimization_profile_async(0, stream)
        context.set_device_memory(*set_up.scratch)
        if lacking not in ("profile", "hidden shape"):
            assert context.set_input_shape("hidden", (3, 224))
        for name, address in set_up.addresses.items():
            assert name == lacking or context.set_tensor_address(name, address)
        head.refused(context.execute_async_v3(stream), why)


def test_8_shapes_that_do_not_go_together(nano: Build, tmp_path: Path) -> None:
    ready = Ready(nano("fp32"), tmp_path, "dense")
    set_shape = ready.context.set_input_shape
    assert set_shape("positions", (1, 1))
    ready.refused(ready.run(), "batch is 1, and 2 elsewhere")
    assert set_shape("positions", (2, 1)) and set_shape("context", (1, 5, 144))
    ready.refused(ready.run(), "context: batch is 1, and 2 elsewhere")


def test_9_memory_that_is_not_there(head: Ready) -> None:
    address = head.device.address(head.buffers["hidden"])
    head.bind("hidden", 2**40)
    head.refused(head.run(), "hidden: 2688 bytes at 0x10000000000 are not allocated")
    head.bind("hidden", address + 256)
    head.refused(head.run(), "hidden: 2688 bytes")  # its end is not
    head.bind("hidden", address)
    head.device.wait()
    assert head.run()
    del head.buffers["hidden"]
    gc.collect()
    head.refused(head.run(), "hidden: 2688 bytes")  # freed
    head.device.wait()  # the first run came before that


def test_10_overlaps(nano: Build, tmp_path: Path) -> None:
    ready = Ready(nano("fp32"), tmp_path, "dense")
    addresses = {name: ready.device.address(buffer) for name, buffer in ready.buffers.items()}
    for output, other in [("y", "x"), ("new", "y"), ("new", "mlp.down.weight")]:
        ready.bind(output, addresses[other])
        ready.refused(ready.run(), "overlaps")
        assert {output, other} == set(ready.log.errors[-1].split(": ")[-1].split()) - {"overlaps"}
        ready.bind(output, addresses[output])
    shared = ready.device.zeros((8192,), np.dtype(np.uint8))
    start = ready.device.address(shared)
    ready.bind("x", start + 2048)
    ready.bind("y", start + 2048 + 2048)  # 2 × 224 × 4 bytes: the next free one but one
    assert ready.run(), ready.log.errors
    ready.bind("y", start + 2048 + 1536)
    ready.refused(ready.run(), "y overlaps x")
    ready.bind("y", addresses["y"])
    ready.context.set_device_memory(start, 8192)
    ready.refused(ready.run(), "scratch overlaps x")


def test_what_was_set_after_a_run_does_not_change_it(head: Ready) -> None:
    other = head.device.zeros((3, 258), np.dtype(np.float32))
    assert head.run()
    head.bind("logits", head.device.address(other))
    head.device.wait()
    assert not other.any() and head.read("logits").tolist() == [[0.0] * 258] * 3


@pytest.mark.parametrize("compiler", ["rtx", "tensorrt"])
def test_only_rtx_has_strategies_and_a_runtime_cache(
    nano: Build, tmp_path: Path, compiler: Compiler
) -> None:
    double = TensorRTDouble(compiler=compiler)
    spec = BuildSpec.load(nano("fp32"))
    folder = write_double_engines(nano("fp32"), spec, PROFILE, compiler, tmp_path)
    content = (folder / "head.engine").read_bytes()
    engine: Any = double.Runtime(Log()).deserialize_cuda_engine(content)
    if compiler == "tensorrt":
        with pytest.raises(AssertionError, match="no strategies"):
            engine.create_runtime_config()
        return
    config = engine.create_runtime_config()
    config.set_execution_context_allocation_strategy(
        ExecutionContextAllocationStrategy.USER_MANAGED
    )
    cache = config.create_runtime_cache()
    for _ in range(2):
        engine.create_execution_context(config)
    assert double.compiled == ["head", "head"]  # without a cache, each for itself
    assert config.set_runtime_cache(cache)
    for _ in range(2):
        engine.create_execution_context(config)
    assert double.compiled == ["head"] * 3
    again = config.create_runtime_cache()
    assert again.deserialize(bytes(cache.serialize())) and again.kernels == {"head"}
    assert not again.deserialize(b"{") and not again.deserialize(b"")
    double.driver.name = "another GPU"
    assert not config.create_runtime_cache().deserialize(bytes(cache.serialize()))


def test_planted_faults(head: Ready) -> None:
    head.double.plant("head", 2, "refuse")
    head.double.plant("head", 3, "logits", row=1)
    head.double.plant("head", 5, "lose")
    assert head.run()
    head.refused(head.run(), "a planted fault")
    assert head.run()
    assert np.isnan(head.read("logits")).all(axis=1).tolist() == [False, True, False]
    assert np.isfinite(head.read("logits")[0]).all()
    assert head.run() and np.isfinite(head.read("logits")).all()
    assert head.run()
    with pytest.raises(DeviceError, match="a planted fault"):
        head.device.wait()
