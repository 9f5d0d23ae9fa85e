"""Let every FP8 linear layer read what it is given, not what the graph computed before it.

Each FP8Linear's first input becomes a graph input `fed.<module>`, fp32 [rows, in], and what was
computed in its place a graph output `computed.<module>`, also fp32. So the stretch of graph between
two linear layers can be held against the reference at the reference's own input: one flip of e4m3
rounding, which is no error, can no longer hide one that is.
"""

import onnx
from onnx import TensorProto, helper

from graphs.ops import DOMAIN
from graphs.ops.fp8_linear import fp8_linear


def feed_linears(model: onnx.ModelProto) -> tuple[onnx.ModelProto, tuple[str, ...]]:
    """A copy of a graph as exported, and the modules that are fed in it."""
    fed = onnx.ModelProto()
    fed.CopyFrom(model)
    graph, modules = fed.graph, []
    fan_in = {i.name: i.type.tensor_type.shape.dim[0].dim_value for i in graph.input}
    linears = [n for n in graph.node if (n.domain, n.op_type) == (DOMAIN, fp8_linear.name)]
    for node in linears:
        x, weight = node.input[0], node.input[1]
        module = weight.removesuffix(".weight")
        shape = ["fed_rows", fan_in[weight]]
        graph.node.append(
            helper.make_node("Cast", [x], [f"computed.{module}"], to=TensorProto.FLOAT)
        )
        for values, kind in ((graph.input, "fed"), (graph.output, "computed")):
            name = f"{kind}.{module}"
            values.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, shape))
        node.input[0] = f"fed.{module}"
        modules.append(module)
    return fed, tuple(modules)
