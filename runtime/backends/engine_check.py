"""An opened engine, held against the spec of its graph and the record of its profiles."""

from typing import Any

from graphs.contract.manifest import ENGINE_MODES
from graphs.contract.spec import BuildError, GraphSpec, TensorSpec
from runtime.backends.engine import LoadedEngine

DATA_TYPES = {"float": "FLOAT", "bfloat16": "BF16", "float8e4m3fn": "FP8", "int64": "INT64"}


def check_engine(engine: LoadedEngine, graph: GraphSpec) -> None:
    """Raises BuildError naming the first tensor or profile that is not as recorded."""
    opened = engine.engine
    found = [opened.get_tensor_name(i) for i in range(opened.num_io_tensors)]
    expected = {t.name: t for t in (*graph.inputs, *graph.outputs)}
    if set(found) != set(expected):
        other = sorted(set(found) ^ set(expected))
        raise _differs(engine, f"tensors {', '.join(other[:4])}: only in one of engine and spec")
    outputs = {t.name for t in graph.outputs}
    for tensor in expected.values():
        _check_tensor(engine, tensor, output=tensor.name in outputs)
    if opened.num_optimization_profiles != len(ENGINE_MODES):
        raise _differs(
            engine,
            f"{len(ENGINE_MODES)} profiles expected, found {opened.num_optimization_profiles}",
        )
    for index, mode in enumerate(ENGINE_MODES):
        for name, bounds in engine.record.shapes[mode].items():
            shapes = tuple(map(tuple, opened.get_tensor_profile_shape(name, index)))
            if shapes != bounds:
                raise _differs(engine, f"{mode}: {name}: {bounds} expected, found {shapes}")


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
    for what, expected, found in checks:
        if expected != found:
            raise _differs(engine, f"{name}: {what} {expected} expected, found {found}")


def _differs(engine: LoadedEngine, how: str) -> BuildError:
    return BuildError(f"{engine.record.file}: {how}; compile it again")
