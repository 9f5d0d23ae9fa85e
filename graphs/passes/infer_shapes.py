"""Give every value of a model a type and a shape, by strict inference through the functions."""

import onnx
import onnx.shape_inference


def infer_shapes(model: onnx.ModelProto) -> onnx.ModelProto:
    """Raises ValueError (or onnx's own errors) where a value stays without a shape."""
    onnx.checker.check_model(model, full_check=True)
    inferred = onnx.shape_inference.infer_shapes(model, check_type=True, strict_mode=True)
    if missing := unshaped(inferred):
        raise ValueError(f"{model.graph.name}: no shape for {missing[0]} ({len(missing)} in all)")
    return inferred


def unshaped(model: onnx.ModelProto) -> list[str]:
    """Names of the graph's values that have no rank."""
    graph = model.graph
    shaped = {i.name for i in graph.initializer}
    for value in (*graph.input, *graph.output, *graph.value_info):
        if value.type.tensor_type.HasField("shape"):
            shaped.add(value.name)
    return [name for node in graph.node for name in node.output if name and name not in shaped]
