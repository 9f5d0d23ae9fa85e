"""Changes that plant a fault in an exported graph, in place."""

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path

import onnx
from onnx import NodeProto, TensorProto, helper, parser

from graphs.contract.spec import GraphName
from graphs.passes.attach_functions import OPS


def node_of(model: onnx.ModelProto, op_type: str, reads: str = "") -> NodeProto:
    """The first node of this op, or the first that reads this value."""
    nodes = (n for n in model.graph.node if n.op_type == op_type)
    node: NodeProto = next(n for n in nodes if not reads or reads in n.input)
    return node


def insert_before(
    model: onnx.ModelProto,
    at: NodeProto,
    nodes: Iterable[NodeProto],
    after: Iterable[NodeProto] = (),
) -> None:
    """Put nodes before one, and others behind it."""
    place = [n.output[0] for n in model.graph.node].index(at.output[0])
    old = list(model.graph.node)
    new = [*old[:place], *nodes, old[place], *after, *old[place + 1 :]]
    del model.graph.node[:]
    model.graph.node.extend(new)


def read_in_3d(model: onnx.ModelProto, weight: str) -> None:
    """Let a linear layer read [1, tokens, in] in place of [tokens, in], which Gemm cannot."""
    linear = node_of(model, "FP8Linear", weight)
    linear.op_type = "FP8Linear3D"
    text = OPS["FP8Linear"].body(len(linear.input)).replace("FP8Linear", linear.op_type)
    product = "product = Gemm<transB = 1>(x_e4m3, weight_e4m3)"
    assert product in text
    in_3d = "in_out = Transpose<perm = [1, 0]>(weight_e4m3)\nproduct = MatMul(x_e4m3, in_out)"
    model.functions.append(parser.parse_function(text.replace(product, in_3d)))
    x, y = linear.input[0], linear.output[0]
    linear.input[0], linear.output[0] = "x_3d", "y_3d"
    model.graph.initializer.append(helper.make_tensor("axis", TensorProto.INT64, [1], [0]))
    insert_before(
        model,
        linear,
        [helper.make_node("Unsqueeze", [x, "axis"], ["x_3d"])],
        [helper.make_node("Squeeze", ["y_3d", "axis"], [y])],
    )
    onnx.checker.check_model(model)


def change_body(model: onnx.ModelProto, op: str, *changes: tuple[str, str]) -> None:
    """Replace parts of the text of a custom op's body."""
    node = node_of(model, op)
    attributes = {a.name: helper.get_attribute_value(a) for a in node.attribute}
    text = OPS[op].body(len(node.input), **attributes)
    for old, new in changes:
        assert text.count(old) == 1, (old, text.count(old))
        text = text.replace(old, new)
    at = [f.name for f in model.functions].index(op)
    model.functions[at].CopyFrom(parser.parse_function(text))


def replace_graph(build: Path, graph: GraphName, content: bytes) -> None:
    """As an export would: the file, and its hash in spec.json."""
    (build / "onnx" / f"{graph}.onnx").write_bytes(content)
    path = build / "spec.json"
    raw = json.loads(path.read_text("utf-8"))
    raw["graphs"][graph]["sha256"] = hashlib.sha256(content).hexdigest()
    path.write_text(json.dumps(raw), "utf-8")
