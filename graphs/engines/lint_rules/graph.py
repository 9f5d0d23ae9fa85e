"""A rule's input, a graph as exported and as TensorRT's parser is given it, and its findings.

A finding names the node of the exported file, since that is the one that can be looked at: inlining
puts the nodes of an op's body, in their order, in the place of the op's node.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

import onnx
import onnx.shape_inference
from onnx import NodeProto

from graphs.contract.manifest import Bounds, EngineMode
from graphs.passes.inline import inline

# What may lie between a weight and the product that reads it, each reading it by its first input.
_TYPES = {"Cast", "CastLike", "DequantizeLinear", "Identity"}
LAYOUT = _TYPES | {"Expand", "Reshape", "Slice", "Squeeze", "Transpose", "Unsqueeze"}

Dims = tuple[int | str, ...]


@dataclass(frozen=True)
class Finding:
    """A rule that a graph breaks. `fault`: what was expected, and what is there."""

    rule: str
    graph: str
    node: str
    fault: str
    consequence: str

    def __str__(self) -> str:
        return f"{self.graph}: {self.rule}: {self.node}: {self.fault}; {self.consequence}"


@dataclass(frozen=True)
class MatrixProduct:
    """A matrix product of an activation and a weight, with the nodes between the two.

    weight: the graph input; via: from it to the product.
    """

    node: NodeProto
    activation: str
    weight: str
    via: tuple[NodeProto, ...]


@dataclass(frozen=True)
class LintGraph:
    """`flat` has standard operators only. `bounds`: the shapes that each profile admits."""

    name: str
    exported: onnx.ModelProto
    flat: onnx.ModelProto
    bounds: Mapping[EngineMode, Mapping[str, Bounds]]

    @classmethod
    def from_model(
        cls, name: str, exported: onnx.ModelProto, bounds: Mapping[EngineMode, Mapping[str, Bounds]]
    ) -> "LintGraph":
        return cls(name, exported, inline(exported), bounds)

    @property
    def inferred(self) -> onnx.ModelProto:
        """The flat graph with what shapes can be inferred."""
        return self._inference[0]

    @property
    def shape_error(self) -> str | None:
        """The reason why shapes cannot be inferred; None where they can."""
        return self._inference[1]

    @cached_property
    def dims(self) -> dict[str, Dims]:
        """The dimensions of every value of the flat graph whose rank is known."""
        graph = self.inferred.graph
        dims: dict[str, Dims] = {i.name: tuple(i.dims) for i in graph.initializer}
        for value in (*graph.input, *graph.value_info, *graph.output):
            tensor = value.type.tensor_type
            if tensor.HasField("shape"):
                dims[value.name] = tuple(d.dim_param or d.dim_value for d in tensor.shape.dim)
        return dims

    @cached_property
    def weights(self) -> dict[str, int]:
        """Bytes of each graph input that is a weight: only parameters have dotted names."""
        return {i.name: _bytes(i.type.tensor_type) for i in self.flat.graph.input if "." in i.name}

    @cached_property
    def producers(self) -> dict[str, NodeProto]:
        return {name: node for node in self.flat.graph.node for name in node.output}

    @cached_property
    def products(self) -> tuple[MatrixProduct, ...]:
        """Every matrix product of the flat graph that reads one weight."""
        nodes = (node for node in self.flat.graph.node if node.op_type in ("MatMul", "Gemm"))
        return tuple(product for node in nodes if (product := self._product(node)))

    def readers(self, value: str) -> list[NodeProto]:
        return [node for node in self.flat.graph.node if value in node.input]

    def source(self, value: str) -> tuple[str, tuple[NodeProto, ...]]:
        """The value that this one is a layout or a type of, and the nodes from there on."""
        via: list[NodeProto] = []
        while (node := self.producers.get(value)) and node.op_type in LAYOUT:
            via.insert(0, node)
            value = node.input[0]
        return value, tuple(via)

    def finding(self, rule: str, node: NodeProto | str, fault: str, consequence: str) -> Finding:
        """node: of the flat graph, or what to call it."""
        name = node if isinstance(node, str) else self._owners.get(node.output[0], node.name)
        return Finding(rule, self.name, name, fault, consequence)

    @cached_property
    def _inference(self) -> tuple[onnx.ModelProto, str | None]:
        try:
            inferred = onnx.shape_inference.infer_shapes(
                self.flat, check_type=True, strict_mode=True, data_prop=True
            )
        except (onnx.shape_inference.InferenceError, ValueError) as e:
            return self.flat, " ".join(str(e).split())
        return inferred, None

    def _product(self, node: NodeProto) -> MatrixProduct | None:
        sources = [self.source(value) for value in node.input[:2]]
        of_weights = [i for i, (name, _) in enumerate(sources) if name in self.weights]
        if len(of_weights) != 1:
            return None
        (at,) = of_weights
        return MatrixProduct(node, node.input[1 - at], *sources[at])

    @cached_property
    def _owners(self) -> dict[str, str]:
        """The exported node that a flat node is, or is part of, by the flat one's first output."""
        sizes = {(f.domain, f.name): len(f.node) for f in self.exported.functions}
        owners: dict[str, str] = {}
        flat: Iterator[NodeProto] = iter(self.flat.graph.node)
        for node in self.exported.graph.node:
            size = sizes.get((node.domain, node.op_type), 1)
            for _, part in zip(range(size), flat, strict=False):
                owners[part.output[0]] = f"{node.name} ({node.op_type})"
        return owners


def _bytes(tensor: onnx.TypeProto.Tensor) -> int:
    itemsize = onnx.helper.tensor_dtype_to_np_dtype(tensor.elem_type).itemsize
    return int(math.prod(d.dim_value for d in tensor.shape.dim) * itemsize)
