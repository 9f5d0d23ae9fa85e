"""Attach the ONNX body of every custom op that a model uses, as functions of the model."""

from typing import Any

import onnx
from onnx import parser

from graphs.ops import DOMAIN, CustomOp
from graphs.ops.fp8_linear import fp8_linear
from graphs.ops.latent_attention import latent_attention
from graphs.ops.rope import rope
from graphs.ops.topk_gate import topk_gate

OPS: dict[str, CustomOp] = {op.name: op for op in (rope, latent_attention, fp8_linear, topk_gate)}


def attach_functions(model: onnx.ModelProto) -> onnx.ModelProto:
    """A copy with one function per custom op used.

    A body is made from its node's attributes, so all nodes of an op must carry the same ones.
    Raises ValueError where they do not, or where a node of our domain is no known op.
    """
    result = onnx.ModelProto()
    result.CopyFrom(model)
    seen: dict[str, dict[str, Any]] = {}
    for node in result.graph.node:
        if node.domain != DOMAIN:
            continue
        if node.op_type not in OPS:
            raise ValueError(f"{node.name}: no custom op {DOMAIN}::{node.op_type}")
        attributes = {a.name: _value(a) for a in node.attribute}
        if seen.setdefault(node.op_type, attributes) != attributes:
            raise ValueError(
                f"{node.name}: {node.op_type} with attributes {attributes}, while another node of "
                f"the graph has {seen[node.op_type]}; one function cannot serve both"
            )
    del result.functions[:]
    for name in sorted(seen):
        result.functions.append(parser.parse_function(OPS[name].body(**seen[name])))
    return result


def _value(attribute: onnx.AttributeProto) -> Any:
    value = onnx.helper.get_attribute_value(attribute)
    return value.decode() if isinstance(value, bytes) else value
