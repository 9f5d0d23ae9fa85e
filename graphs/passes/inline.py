"""Replace every custom op by its body, with unique names.

TensorRT's parser names layers by node and fails on a function that is called twice.
"""

import onnx
import onnx.inliner


def inline(model: onnx.ModelProto) -> onnx.ModelProto:
    """A copy of standard operators only, every node and value with a name of its own."""
    flat = onnx.inliner.inline_local_functions(model)
    for index, node in enumerate(flat.graph.node):
        node.name = f"{node.op_type}_{index}"
    return flat
