"""Give the experts that a token chose in ascending order, and their weights with them.

They are a set, which a graph lists by score. Rounding swaps two of nearly the same score, and a
tool that compares element by element would take that for an error.
"""

import numpy as np
import onnx
from onnx import helper, numpy_helper


def sort_experts(model: onnx.ModelProto) -> onnx.ModelProto:
    """A copy of a MoE block's graph. Raises ValueError for one without these two outputs."""
    result = onnx.ModelProto()
    result.CopyFrom(model)
    graph = result.graph
    outputs = {o.name: o.type.tensor_type.shape.dim[1].dim_value for o in graph.output}
    if not {"experts", "expert_weights"} <= set(outputs):
        raise ValueError(
            f"{graph.name}: expected outputs experts and expert_weights, got {outputs}"
        )
    by_score = {name: f"{name}_by_score" for name in ("experts", "expert_weights")}
    for node in graph.node:
        for names in (node.input, node.output):
            names[:] = [by_score.get(name, name) for name in names]
    count = np.array([outputs["experts"]], np.int64)
    graph.initializer.append(numpy_helper.from_array(count, "experts_count"))
    graph.node.extend(
        [
            helper.make_node(
                "TopK",
                [by_score["experts"], "experts_count"],
                ["experts", "experts_order"],
                name="sort_experts",
                largest=0,
            ),
            helper.make_node(
                "GatherElements",
                [by_score["expert_weights"], "experts_order"],
                ["expert_weights"],
                name="sort_expert_weights",
                axis=1,
            ),
        ]
    )
    return result
