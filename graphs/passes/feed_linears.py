"""Let every FP8 linear layer read what it is given, not what the graph computed before it.

1. An FP8Linear whose input is a tap reads a new graph input instead, `fed.<module>`, fp32
   [rows, in]; the tap keeps what the graph computed in its place.
2. One that reads anything else, as an expert's gate_up its rows of h, stays as it is.

So the stretch of graph between two linear layers can be held against the reference at the
reference's own input: one flip of e4m3 rounding, which is no error, can no longer hide one that is.
"""

from collections.abc import Sequence

import onnx
from onnx import TensorProto, helper

from graphs.contract.spec import TapSpec
from graphs.ops import DOMAIN
from graphs.ops.fp8_linear import fp8_linear

FED = "fed."


def feed_linears(
    model: onnx.ModelProto, taps: Sequence[TapSpec]
) -> tuple[onnx.ModelProto, dict[str, TapSpec]]:
    """A copy of a graph as exported, and by which tap each of its new inputs is to be fed."""
    fed = onnx.ModelProto()
    fed.CopyFrom(model)
    whole = {t.value: t for t in taps if not t.inner and t.columns is None}
    dims = {i.name: i.type.tensor_type.shape.dim for i in fed.graph.input}
    sources: dict[str, TapSpec] = {}
    for node in fed.graph.node:
        if (node.domain, node.op_type) != (DOMAIN, fp8_linear.name) or node.input[0] not in whole:
            continue
        weight = node.input[1]
        name = FED + weight.removesuffix(".weight")
        sources[name] = whole[node.input[0]]
        shape = [f"{name}.rows", dims[weight][1].dim_value]
        fed.graph.input.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, shape))
        node.input[0] = name
    return fed, sources
