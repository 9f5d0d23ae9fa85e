"""Derive the form that a tool without 16- and 8-bit arrays can feed, read and cut anywhere.

1. Inputs and outputs get the shapes given, and what follows from shapes alone is folded away.
   Constants become initialisers, so no node is left whose value depends on nothing.
2. Inputs of bf16 become fp32; the Casts behind them, then of no effect, are folded too.
3. A bf16 output becomes fp32 by a Cast behind the one that rounds it.
4. A MatMul of two dequantised matrices becomes the Gemm that it is: fully optimised, as such tools
   open it, ONNX Runtime would take the MatMul for one of integers and then reject it.
"""

from collections.abc import Mapping

import onnx
import onnx_ir as ir
from onnx import TensorProto, TensorShapeProto, helper
from onnx_ir.passes.common import LiftConstantsToInitializersPass, RemoveUnusedNodesPass
from onnxscript import optimizer

from graphs.passes.infer_shapes import infer_shapes

_BF16, _FP32 = TensorProto.BFLOAT16, TensorProto.FLOAT


def freeze(model: onnx.ModelProto, shapes: Mapping[str, tuple[int, ...]]) -> onnx.ModelProto:
    """A copy of a widened model. shapes: of its outputs, and of inputs that have dynamic ones.

    Raises ValueError where a value's shape does not follow from them.
    """
    frozen = onnx.ModelProto()
    frozen.CopyFrom(model)
    graph = frozen.graph
    _read_rounded(graph)
    _take_for_gemm(graph)
    for value in (*graph.input, *graph.output):
        tensor = value.type.tensor_type
        tensor.elem_type = _FP32 if tensor.elem_type == _BF16 else tensor.elem_type
        if value.name in shapes:
            tensor.shape.CopyFrom(_shape(shapes[value.name]))
    del graph.value_info[:]  # inference would keep the names of sizes
    frozen = infer_shapes(_fold(frozen))
    for value in frozen.graph.value_info:
        if not all(dim.HasField("dim_value") for dim in value.type.tensor_type.shape.dim):
            raise ValueError(f"{graph.name}: {value.name}'s shape does not follow from {shapes}")
    return frozen


def _shape(sizes: tuple[int, ...]) -> TensorShapeProto:
    return TensorShapeProto(dim=[TensorShapeProto.Dimension(dim_value=size) for size in sizes])


def _fold(model: onnx.ModelProto) -> onnx.ModelProto:
    folded = ir.serde.deserialize_model(model)
    optimizer.fold_constants(folded, onnx_shape_inference=True)
    RemoveUnusedNodesPass()(folded)
    LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(folded)
    result: onnx.ModelProto = ir.serde.serialize_model(folded)
    del result.graph.value_info[:]
    return result


def _read_rounded(graph: onnx.GraphProto) -> None:
    """Case 3, both Casts directly behind what they cast, and not at the end where widening left the
    first: a search through the nodes for where a result goes wrong takes the last one for wrong.
    """
    narrow = {o.name for o in graph.output if o.type.tensor_type.elem_type == _BF16}
    casts = {node.input[0]: node for node in graph.node if node.output[0] in narrow}
    nodes = [node for node in graph.node if node.output[0] not in narrow]
    del graph.node[:]
    for node in nodes:
        graph.node.append(node)
        for name in casts.keys() & set(node.output):
            output = casts[name].output[0]
            casts[name].output[0] = f"{output}_rounded"
            read = helper.make_node(
                "Cast", casts[name].output, [output], f"read_{output}", to=_FP32
            )
            graph.node.extend([casts[name], read])


def _take_for_gemm(graph: onnx.GraphProto) -> None:
    dequantised = {n.output[0] for n in graph.node if n.op_type == "DequantizeLinear"}
    for node in graph.node:
        if node.op_type == "MatMul" and dequantised.issuperset(node.input):
            node.op_type = "Gemm"
