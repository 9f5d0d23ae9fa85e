"""Derive the form that ONNX Runtime's CPU provider runs: it has no bf16 arithmetic.

1. Inputs and outputs keep their types, so the packed weights and the cache are the engine's own
   bytes; a Cast stands behind every bf16 input and before every bf16 output.
2. Every bf16 value in between becomes fp32: casts, constants, initialisers, and the `output_dtype`
   of dequantisers.
3. FP8 stays: its rounding is part of the model.

So what differs from the engine is only the rounding of intermediate activations to bf16. The
rounded form has that too: every value that is bf16 in the graph is rounded where it is made, by a
Cast to bf16 and one back. A product, a sum or a norm is computed in fp32 before it is rounded, as
in an engine. What it cannot show is where TensorRT, in a fused kernel, keeps a bf16 value wider.
"""

import onnx
import onnx.shape_inference
from onnx import TensorProto, helper, numpy_helper

from graphs.passes.infer_shapes import infer_shapes
from graphs.passes.inline import inline

_BF16, _FP32 = TensorProto.BFLOAT16, TensorProto.FLOAT
_MOVES = {"Concat", "Expand", "Gather", "Identity", "Reshape", "Slice", "Split", "Squeeze"}
_MOVES |= {"Transpose", "Unsqueeze"}
_TYPE_ATTRIBUTES = {"Cast": "to", "DequantizeLinear": "output_dtype"}


def widen(model: onnx.ModelProto, rounded: bool = False) -> onnx.ModelProto:
    """The widened copy, functions inlined; `rounded`: bf16 values are rounded, as in an engine.

    A model without bf16 comes back inlined only.
    """
    wide = inline(model)
    graph = wide.graph
    narrow = _narrow_values(infer_shapes(wide).graph) if rounded else set()
    del graph.value_info[:]
    for node in graph.node:
        _widen_node(node)
    for initializer in graph.initializer:
        if initializer.data_type == _BF16:
            initializer.CopyFrom(_widened_tensor(initializer))
    _cast_inputs(graph)
    if rounded:
        _round_values(graph, narrow)
    _cast_outputs(graph)
    return infer_shapes(wide)


def _narrow_values(graph: onnx.GraphProto) -> set[str]:
    values = (*graph.value_info, *graph.output)
    return {value.name for value in values if value.type.tensor_type.elem_type == _BF16}


def _round_values(graph: onnx.GraphProto, narrow: set[str]) -> None:
    """Round each of these values to bf16 where a node computes it; moving one rounds nothing."""
    nodes = list(graph.node)
    del graph.node[:]
    for node in nodes:
        made = [n for n in node.output if n in narrow and node.op_type not in _MOVES]
        for name in made:
            node.output[list(node.output).index(name)] = f"{name}_unrounded"
        graph.node.append(node)
        for name in made:
            unrounded, kept = f"{name}_unrounded", f"{name}_kept"
            graph.node.append(helper.make_node("Cast", [unrounded], [kept], name=kept, to=_BF16))
            graph.node.append(helper.make_node("Cast", [kept], [name], name=unrounded, to=_FP32))


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
