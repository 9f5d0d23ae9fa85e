"""Compares an opened engine with its graph's spec and its profiles' record."""

from typing import Any

from graphs.contract.manifest import ENGINE_MODES
from graphs.contract.spec import BuildError, GraphSpec, TensorSpec
from runtime.backends.engine import LoadedEngine

DATA_TYPES = {"float": "FLOAT", "bfloat16": "BF16", "float8e4m3fn": "FP8", "int64": "INT64"}


def check_engine(engine: LoadedEngine, graph: GraphSpec) -> None:
    """Raises BuildError naming the first tensor or profile that is not as recorded."""
    opened = engine.engine
    names = {opened.get_tensor_name(i) for i in range(opened.num_io_tensors)}
    expected = {t.name: t for t in (*graph.inputs, *graph.outputs)}
    if unmatched := sorted(names ^ expected.keys()):
        raise _differs(
            engine, f"tensors {', '.join(unmatched[:4])}: only in one of engine and spec"
        )
    outputs = {t.name for t in graph.outputs}
    for tensor in expected.values():
        _check_tensor(engine, tensor, output=tensor.name in outputs)
    if opened.num_optimization_profiles != len(ENGINE_MODES):
        raise _differs(
            engine,
            f"expected {len(ENGINE_MODES)} profiles, got {opened.num_optimization_profiles}",
        )
    for index, mode in enumerate(ENGINE_MODES):
        for name, bounds in engine.record.shapes[mode].items():
            shapes = tuple(map(tuple, opened.get_tensor_profile_shape(name, index)))
            if shapes != bounds:
                raise _differs(engine, f"{mode}: {name}: expected {bounds}, got {shapes}")


def _check_tensor(engine: LoadedEngine, tensor: TensorSpec, output: bool) -> None:
    trt, opened, name = engine.library.trt, engine.engine, tensor.name
    dims = tuple(d if isinstance(d, int) else -1 for d in tensor.dims)
    mode = trt.TensorIOMode.OUTPUT if output else trt.TensorIOMode.INPUT
    checks: list[tuple[str, Any, Any]] = [
        ("direction", mode, opened.get_tensor_mode(name)),
        (
            "type",
            getattr(trt.DataType, DATA_TYPES[tensor.dtype]),
            opened.get_tensor_dtype(name),
        ),
        ("shape", dims, tuple(opened.get_tensor_shape(name))),
        ("location", trt.TensorLocation.DEVICE, opened.get_tensor_location(name)),
    ]
    for what, expected, actual in checks:
        if expected != actual:
            raise _differs(engine, f"{name}: expected {what} {expected}, got {actual}")


def _differs(engine: LoadedEngine, difference: str) -> BuildError:
    return BuildError(f"{engine.record.file}: {difference}; compile it again")
