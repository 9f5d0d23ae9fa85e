"""ONNX Runtime, as every part of the project uses it: one session per graph, everything bound.

bf16 and FP8 have no numpy type that ONNX Runtime takes, so tensors are handed over as views of
their bytes, without a copy, and results are written into arrays of the caller's.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from onnx import TensorProto

from graphs.contract.spec import BuildSpec
from graphs.contract.tensorfile import DTYPES, Array
from graphs.passes.pointwise import pointwise
from graphs.passes.widen import widen

ONNX_TYPE = {dtype: TensorProto.DataType.Value(n.upper()) for n, (_, dtype) in DTYPES.items()}
_CARRIER = {1: np.uint8, 2: np.uint16}


class SessionError(RuntimeError):
    """A graph that ONNX Runtime does not take where it was to run."""


def ort_value(array: Array) -> Any:
    """An OrtValue over the array's own memory. Raises ValueError where it is not contiguous: ONNX
    Runtime would copy it silently, and what is written to it would be lost.
    """
    if not array.flags.c_contiguous:
        raise ValueError(f"array: expected a contiguous one, got strides {array.strides}")
    onnx_type = ONNX_TYPE[array.dtype]
    if array.dtype.kind != "V" and array.dtype.itemsize > 2:
        return ort.OrtValue.ortvalue_from_numpy(array)
    carrier = array.view(_CARRIER[array.dtype.itemsize])
    return ort.OrtValue.ortvalue_from_numpy_with_onnx_type(carrier, onnx_type)


def open_session(
    spec: BuildSpec,
    content: bytes,
    threads: int,
    cuda_stream: int | None = None,
    row_invariant: bool = False,
    rounded: bool = False,
) -> Any:
    """A session of one graph: on the CPU fp32 with large linear layers as convolutions of few
    rows, other precisions in their widened form, or `rounded` as an engine's values are.

    `threads` is ONNX Runtime's thread count, 0 for one per core. `row_invariant` leaves the linear
    layers as they are: what one makes of a row is then the same, bit for bit, beside however many
    others, from two on. With a stream's handle the graph
    runs on its GPU, as exported. Raises SessionError where that cannot be.
    """
    if cuda_stream is None:
        model = onnx.load_from_string(content)
        if spec.precision != "fp32":
            model = widen(model, rounded)
        elif not row_invariant:
            model = pointwise(model)
        content = model.SerializeToString()
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 3
    # its FP8 Q/DQ fusion makes a node that it then rejects
    options.add_session_config_entry("session.disable_quant_qdq", "1")
    # idle threads of one graph would wait in a busy loop, and slow down the graph that runs next
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    if cuda_stream is None:
        return ort.InferenceSession(content, options, providers=["CPUExecutionProvider"])
    # without this it would run on the CPU what it cannot on the GPU, in silence
    options.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
    provider = ("CUDAExecutionProvider", {"device_id": 0, "user_compute_stream": str(cuda_stream)})
    try:
        return ort.InferenceSession(content, options, providers=[provider])
    except Exception as e:  # a type of its own for each of its statuses
        raise SessionError(f"ONNX Runtime cannot run the graph on the GPU: {e}") from e


def run(
    session: Any,
    inputs: Mapping[str, Array],
    outputs: Mapping[str, Array],
    made: Sequence[str] = (),
) -> dict[str, Array]:
    """One run that writes into `outputs`; returns new arrays of the fp32 outputs in `made`."""
    binding = session.io_binding()
    for name, array in inputs.items():
        binding.bind_ortvalue_input(name, ort_value(array))
    for name, array in outputs.items():
        binding.bind_ortvalue_output(name, ort_value(array))
    for name in made:
        binding.bind_output(name, "cpu")
    session.run_with_iobinding(binding)
    results = binding.get_outputs()[len(outputs) :]
    return {name: value.numpy() for name, value in zip(made, results, strict=True)}
