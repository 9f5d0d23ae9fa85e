"""Let ONNX Runtime's CPU provider read large weights, for few rows, as convolutions of width 1.

1. `Gemm(x [M, in], weight [out, in], transB=1)` becomes, for up to FEW rows, a Conv of xᵀ
   [1, in, M] with the weight [out, in, 1]: the same products, but the weight is read
   as it lies, where Gemm repacks it at every run of two rows and more (7168×18432, 2 threads, ms at
   1 / 2 / 8 / 16 rows: Gemm 17, 47, 51, 56; Conv 18, 31, 31, 31). For more rows it stays: there
   both take the same time, and xᵀ and yᵀ have to be transposed.
2. A weight below LARGE elements, or one that the graph makes, is left alone: choosing and
   transposing cost more there than they save.
"""

from collections.abc import Iterator
from math import prod

import onnx
from onnx import TensorProto, helper

LARGE = 1 << 20  # elements; 4 MB in fp32
FEW = 64


def pointwise(model: onnx.ModelProto) -> onnx.ModelProto:
    """A copy with a choice in the place of each such Gemm; nothing is copied when it runs."""
    changed = onnx.ModelProto()
    changed.CopyFrom(model)
    graph = changed.graph
    shapes = {
        i.name: [d.dim_value for d in i.type.tensor_type.shape.dim]
        for i in graph.input
        if i.type.tensor_type.elem_type == TensorProto.FLOAT
    }
    del graph.node[:]
    for node in model.graph.node:
        large = _reads_large(node, shapes)
        graph.node.extend(_choice(node, shapes[node.input[1]][0]) if large else [node])
    return changed


def _reads_large(node: onnx.NodeProto, shapes: dict[str, list[int]]) -> bool:
    """Whether the node is x · weightᵀ and no more, with a weight that is large and an input."""
    if node.op_type != "Gemm" or len(node.input) != 2 or node.input[1] not in shapes:
        return False
    attributes = {a.name: helper.get_attribute_value(a) for a in node.attribute}
    plain = not attributes.pop("transA", 0) and attributes.pop("alpha", 1.0) == 1.0
    return plain and attributes.pop("transB", 0) == 1 and prod(shapes[node.input[1]]) >= LARGE


def _choice(gemm: onnx.NodeProto, width: int) -> Iterator[onnx.NodeProto]:
    """The nodes that choose between the two ways to y [M, width]."""
    (x, _), (y,) = gemm.input, gemm.output
    rows, most, is_few, of_many = (f"{y}.{name}" for name in ("rows", "most", "is_few", "of_many"))
    unchanged = onnx.NodeProto()
    unchanged.CopyFrom(gemm)
    unchanged.output[0] = of_many
    yield helper.make_node("Shape", [x], [rows], start=0, end=1)
    yield helper.make_node("Constant", [], [most], value_ints=[FEW])
    yield helper.make_node("LessOrEqual", [rows, most], [is_few])
    few, many = _graph(_convolution(gemm), width), _graph([unchanged], width)
    yield helper.make_node("If", [is_few], [y], gemm.name, then_branch=few, else_branch=many)


def _graph(nodes: list[onnx.NodeProto], width: int) -> onnx.GraphProto:
    (result,) = nodes[-1].output
    output = helper.make_tensor_value_info(result, TensorProto.FLOAT, [None, width])
    return helper.make_graph(nodes, result, [], [output])


def _convolution(gemm: onnx.NodeProto) -> list[onnx.NodeProto]:
    (x, weight), (y,) = gemm.input, gemm.output
    names = ("first", "last", "turned_x", "image", "kernel", "convolved", "turned_y", "of_few")
    first, last, turned_x, image, kernel, convolved, turned_y, of_few = (
        f"{y}.{name}" for name in names
    )
    return [
        helper.make_node("Constant", [], [first], value_ints=[0]),
        helper.make_node("Constant", [], [last], value_ints=[2]),
        helper.make_node("Transpose", [x], [turned_x], perm=[1, 0]),
        helper.make_node("Unsqueeze", [turned_x, first], [image]),
        helper.make_node("Unsqueeze", [weight, last], [kernel]),
        helper.make_node("Conv", [image, kernel], [convolved]),
        helper.make_node("Squeeze", [convolved, first], [turned_y]),
        helper.make_node("Transpose", [turned_y], [of_few], perm=[1, 0]),
    ]
