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

    A body is made from its node's attributes and number of inputs, so all nodes of an op must have
    the same ones. Raises ValueError where they do not, where an input is left out that must be
    there, or where a node of our domain is no known op.
    """
    result = onnx.ModelProto()
    result.CopyFrom(model)
    seen: dict[str, tuple[int, dict[str, Any]]] = {}
    for node in result.graph.node:
        if node.domain != DOMAIN:
            continue
        if node.op_type not in OPS:
            raise ValueError(f"{node.name}: no custom op {DOMAIN}::{node.op_type}")
        inputs, attributes = len(node.input), {a.name: _value(a) for a in node.attribute}
        first = seen.setdefault(node.op_type, (inputs, attributes))
        if first != (inputs, attributes):
            raise ValueError(
                f"{node.name}: {node.op_type} with {inputs} inputs and attributes {attributes}, "
                f"while another node of the graph has {first[0]} and {first[1]}; one function "
                "cannot serve both"
            )
    del result.functions[:]
    for name, (inputs, attributes) in sorted(seen.items()):
        function = parser.parse_function(OPS[name].body(inputs, **attributes))
        if len(function.input) != inputs:
            raise ValueError(
                f"{name}: expected inputs {', '.join(function.input)}, got {inputs} of them"
            )
        result.functions.append(function)
    return result


def _value(attribute: onnx.AttributeProto) -> Any:
    value = onnx.helper.get_attribute_value(attribute)
    return value.decode() if isinstance(value, bytes) else value
