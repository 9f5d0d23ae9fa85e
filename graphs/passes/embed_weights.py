"""Turn weights from inputs into initialisers whose bytes lie in a file beside the model.

What is computed of weights alone stands first then: a search through the nodes, in their order, for
where a result goes wrong meets no weight on its way.
"""

from collections.abc import Mapping

import onnx
from onnx import StringStringEntryProto, TensorProto

Span = tuple[int, int]  # of one tensor's bytes in the file: where they begin, and how many


def embed_weights(model: onnx.ModelProto, file: str, spans: Mapping[str, Span]) -> onnx.ModelProto:
    """A copy whose inputs named in `spans` lie in `file`, named from the model's folder."""
    whole = onnx.ModelProto()
    whole.CopyFrom(model)
    inputs = {value.name: value for value in whole.graph.input}
    for name, (offset, length) in spans.items():
        tensor = inputs[name].type.tensor_type
        place = {"location": file, "offset": str(offset), "length": str(length)}
        initializer = TensorProto(
            name=name,
            data_type=tensor.elem_type,
            dims=[dim.dim_value for dim in tensor.shape.dim],
            data_location=TensorProto.EXTERNAL,
            external_data=[StringStringEntryProto(key=k, value=v) for k, v in place.items()],
        )
        whole.graph.initializer.append(initializer)
        whole.graph.input.remove(inputs[name])
    _weights_first(whole.graph)
    return whole


def _weights_first(graph: onnx.GraphProto) -> None:
    computed = {value.name for value in graph.input}
    first, rest = list[onnx.NodeProto](), list[onnx.NodeProto]()
    for node in graph.node:
        if computed.isdisjoint(node.input):
            first.append(node)
        else:
            rest.append(node)
            computed.update(node.output)
    del graph.node[:]
    graph.node.extend([*first, *rest])
