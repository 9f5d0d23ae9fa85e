"""Give a graph's taps as outputs, in fp32.

1. A tap that is an output already stays as it is.
2. Another value of the graph is cast to a new output `tap.<name>`. Where several taps are parts of
   one value, each gets a copy of the whole: columns are cut later.
3. A value inside a custom op's body becomes an output of the op's function first, and so of every
   node of the op. Several are its parts, joined along the axis of tokens.

For parity alone: what is compiled never has them.
"""

from collections.abc import Iterable

import onnx
from onnx import TensorProto, helper

from graphs.contract.spec import TapSpec
from graphs.passes.infer_shapes import infer_shapes

PREFIX = "tap."


def expose_taps(model: onnx.ModelProto, taps: Iterable[TapSpec]) -> onnx.ModelProto:
    """A copy of a graph as exported, with an output for every tap."""
    exposed = onnx.ModelProto()
    exposed.CopyFrom(model)
    graph = exposed.graph
    outputs = {output.name for output in model.graph.output}
    for tap in (t for t in taps if t.inner or t.value not in outputs):
        value = _joined(exposed, tap) if tap.inner else tap.value
        graph.node.append(
            helper.make_node("Cast", [value], [PREFIX + tap.name], to=TensorProto.FLOAT)
        )
        shape = [None] * len(tap.axes)  # strict inference fills it in
        graph.output.append(
            helper.make_tensor_value_info(PREFIX + tap.name, TensorProto.FLOAT, shape)
        )
    return infer_shapes(exposed)


def _joined(model: onnx.ModelProto, tap: TapSpec) -> str:
    """The name in the graph of a value of a body, whole."""
    parts = [_from_body(model, tap.value, inner) for inner in tap.inner]
    if len(parts) == 1:
        return parts[0]
    whole = f"{tap.value}.{tap.name}"
    axis = tap.axes.index("S")
    model.graph.node.append(helper.make_node("Concat", parts, [whole], axis=axis))
    return whole


def _from_body(model: onnx.ModelProto, output: str, inner: str) -> str:
    """The name in the graph of a value in the body of the op whose first output is `output`."""
    node = next(n for n in model.graph.node if n.output[0] == output)
    function = next(f for f in model.functions if f.name == node.op_type)
    if inner not in function.output:
        function.output.append(inner)
        for each in (n for n in model.graph.node if n.op_type == node.op_type):
            each.output.append(f"{each.output[0]}.{inner}")
    name: str = node.output[list(function.output).index(inner)]
    return name
