"""Derive the form that ONNX Runtime's CPU provider runs: it has no bf16 arithmetic.

1. Inputs and outputs keep their types, so the packed weights and the cache are the engine's own
   bytes; a Cast stands behind every bf16 input and before every bf16 output.
2. Every bf16 value in between becomes fp32: casts, constants, initialisers, and the `output_dtype`
   of dequantisers.
3. FP8 stays: its rounding is part of the model.

So what differs from the engine is only the rounding of intermediate activations to bf16.
"""

import onnx
import onnx.shape_inference
from onnx import TensorProto, helper, numpy_helper

from graphs.passes.infer_shapes import infer_shapes
from graphs.passes.inline import inline

_BF16, _FP32 = TensorProto.BFLOAT16, TensorProto.FLOAT
_TYPE_ATTRIBUTES = {"Cast": "to", "DequantizeLinear": "output_dtype"}


def widen(model: onnx.ModelProto) -> onnx.ModelProto:
    """The widened copy, functions inlined. A model without bf16 comes back inlined only."""
    wide = inline(model)
    graph = wide.graph
    del graph.value_info[:]
    for node in graph.node:
        _widen_node(node)
    for initializer in graph.initializer:
        if initializer.data_type == _BF16:
            initializer.CopyFrom(_widened_tensor(initializer))
    _cast_inputs(graph)
    _cast_outputs(graph)
    return infer_shapes(wide)


def _widen_node(node: onnx.NodeProto) -> None:
    for attribute in node.attribute:
        if _TYPE_ATTRIBUTES.get(node.op_type) == attribute.name and attribute.i == _BF16:
            attribute.i = _FP32
        elif attribute.type == onnx.AttributeProto.TENSOR and attribute.t.data_type == _BF16:
            attribute.t.CopyFrom(_widened_tensor(attribute.t))


def _widened_tensor(tensor: TensorProto) -> TensorProto:
    return numpy_helper.from_array(numpy_helper.to_array(tensor).astype("float32"), tensor.name)


def _cast_inputs(graph: onnx.GraphProto) -> None:
    narrow = [i.name for i in graph.input if i.type.tensor_type.elem_type == _BF16]
    for node in graph.node:
        for index, name in enumerate(node.input):
            if name in narrow:
                node.input[index] = f"{name}_wide"
    nodes = list(graph.node)
    del graph.node[:]
    graph.node.extend(
        helper.make_node("Cast", [name], [f"{name}_wide"], name=f"widen_{name}", to=_FP32)
        for name in narrow
    )
    graph.node.extend(nodes)


def _cast_outputs(graph: onnx.GraphProto) -> None:
    narrow = [o.name for o in graph.output if o.type.tensor_type.elem_type == _BF16]
    for node in graph.node:
        for names in (node.input, node.output):
            for index, name in enumerate(names):
                if name in narrow:
                    names[index] = f"{name}_wide"
    graph.node.extend(
        helper.make_node("Cast", [f"{name}_wide"], [name], name=f"narrow_{name}", to=_BF16)
        for name in narrow
    )
