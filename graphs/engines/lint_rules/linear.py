"""Linear layers: what makes the builder copy a weight matrix at every run."""

from collections.abc import Iterator, Mapping
from typing import Any

from onnx import NodeProto, TensorProto, helper, numpy_helper

from graphs.engines.lint_rules.graph import Finding, LintGraph, MatrixProduct

FP8_TYPES = (
    TensorProto.FLOAT8E4M3FN,
    TensorProto.FLOAT8E4M3FNUZ,
    TensorProto.FLOAT8E5M2,
    TensorProto.FLOAT8E5M2FNUZ,
)
UNIT = {"value_float": 1.0}  # the attributes of a constant that is 1


def two_dimensional_activations(graph: LintGraph) -> Iterator[Finding]:
    """A linear layer reads [tokens, in]."""
    for product in graph.products:
        if _rank(graph, product.weight) != 2:
            continue
        if (rank := _rank(graph, product.activation)) not in (None, 2):
            size = graph.weights[product.weight] / 1e6
            yield graph.finding(
                "2-D linear activations",
                product.node,
                f"{product.weight}: expected an activation [tokens, in], got {rank} dimensions",
                f"the whole matrix, {size:.1f} MB, is copied at every run (measured for one of "
                "58.7 MB in K2's dense block: 69.7 MB of scratch instead of 14.3 MB)",
            )


def fp8_products(graph: LintGraph) -> Iterator[Finding]:
    """An FP8 weight [out, in] and its activation are dequantised by 1 to fp32, and multiplied."""
    for value in graph.flat.graph.input:
        if value.name not in graph.weights or value.type.tensor_type.elem_type not in FP8_TYPES:
            continue
        readers = graph.readers(value.name)
        wrong = [(n, fault) for n in readers if (fault := _form_fault(graph, value.name, n))]
        wrong += [
            (p.node, fault)
            for p in graph.products
            if p.weight == value.name and not wrong and (fault := _product_fault(graph, p))
        ]
        for node, fault in wrong:
            yield graph.finding(
                "FP8 products",
                node,
                f"{value.name}: {fault}",
                f"the matrix, {graph.weights[value.name] / 1e6:.1f} MB, is widened at every run "
                "and the product is none of FP8 (with a scale a channel it is one of bf16; with "
                "scale blocks 75 MB of scratch were measured for a matrix of 33.6 MB, instead of "
                "10.4 MB)",
            )


def _form_fault(graph: LintGraph, weight: str, reader: NodeProto) -> str | None:
    if reader.op_type != "DequantizeLinear":
        return f"expected DequantizeLinear to read it, got {reader.op_type}"
    if len(graph.dims[weight]) != 2:
        return f"expected [out, in], got {len(graph.dims[weight])} dimensions"
    return _scale_fault(graph, reader)


def _scale_fault(graph: LintGraph, dequantise: NodeProto) -> str | None:
    attributes = _attributes(dequantise)
    if attributes.get("block_size"):
        return f"expected dequantisation by 1, got scale blocks of {attributes['block_size']}"
    if not _is_one(graph, dequantise.input[1]):
        return f"expected dequantisation by 1, got a scale {dequantise.input[1]}"
    if attributes.get("output_dtype", TensorProto.FLOAT) != TensorProto.FLOAT:
        name = TensorProto.DataType.Name(attributes["output_dtype"])
        return f"expected dequantisation to fp32, got {name}"
    return None


def _product_fault(graph: LintGraph, product: MatrixProduct) -> str | None:
    between = [n.op_type for n in product.via if n.op_type != "DequantizeLinear"]
    if between:
        return f"expected nothing between the matrix and its product, got {', '.join(between)}"
    if product.node.op_type != "Gemm" or not _attributes(product.node).get("transB"):
        return "expected Gemm with transB, which reads [out, in], got another product"
    activation = graph.producers.get(product.activation)
    if activation is None or activation.op_type != "DequantizeLinear":
        kind = "an input" if activation is None else activation.op_type
        return f"expected an activation dequantised from FP8, got {kind}"
    return _scale_fault(graph, activation)


def _is_one(graph: LintGraph, value: str) -> bool:
    """Whether it is a constant scalar of 1."""
    for tensor in graph.flat.graph.initializer:
        if tensor.name == value:
            return not tensor.dims and bool(numpy_helper.to_array(tensor) == 1)
    node = graph.producers.get(value)
    return node is not None and node.op_type == "Constant" and _attributes(node) == UNIT


def unshared_quantisation(graph: LintGraph) -> Iterator[Finding]:
    """No two matrix products read one quantised activation: their weights are fused at packing."""
    readers: dict[str, list[MatrixProduct]] = {}
    for product in graph.products:
        if root := _quantised(graph, product.activation):
            readers.setdefault(root, []).append(product)
    for root, products in readers.items():
        if len(products) > 1:
            yield graph.finding(
                "no shared Q/DQ",
                products[1].node,
                f"{root}: expected 1 product of the quantised activation, got {len(products)}: "
                f"{', '.join(p.weight for p in products)}",
                "the matrices are concatenated at every run (measured for K2's experts: 128 MB of "
                "scratch instead of 8.9 MB for two, 520 MB for eight); fuse them at packing, or "
                "let each gather its own rows",
            )


def _quantised(graph: LintGraph, activation: str) -> str | None:
    """The value that a product's activation was before its scale and its quantisation."""
    value, via = graph.source(activation)
    if not any(node.op_type == "DequantizeLinear" for node in via):
        return None
    quantise = graph.producers.get(value)
    if quantise is None or quantise.op_type != "QuantizeLinear":
        return value
    value = quantise.input[0]
    scaling = graph.producers.get(value)
    if scaling is not None and scaling.op_type in ("Div", "Mul"):
        value = scaling.input[0]
    return graph.source(value)[0]


def no_profile_of_one_row(graph: LintGraph) -> Iterator[Finding]:
    """Every profile lets batch × tokens be above 1."""
    for mode, bounds in graph.bounds.items():
        greatest = _greatest(graph, {name: shapes[2] for name, shapes in bounds.items()})
        fixed = [p for p in graph.products if _rows(graph, p, greatest) == 1]
        if fixed:
            yield graph.finding(
                "no profile of one row",
                fixed[0].node,
                f"{mode}: expected a range up to 2 rows of {fixed[0].activation} or more, got one "
                "row",
                "the weights are re-laid out at every run (measured for K2's dense block: 25.6 MB "
                "of scratch instead of 9.6 MB at FP8, 966 MB instead of 14 MB at 16 bits)",
            )


def _greatest(graph: LintGraph, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, int]:
    """The greatest size of every named dimension."""
    return {
        dim: size
        for name, shape in shapes.items()
        for dim, size in zip(graph.dims[name], shape, strict=True)
        if isinstance(dim, str)
    }


def _rows(graph: LintGraph, product: MatrixProduct, greatest: Mapping[str, int]) -> int | None:
    """Rows of a linear layer's activation at most, where its dimension is a product of names."""
    dims = graph.dims.get(product.activation, ())
    factors = str(dims[0]).split("*") if len(dims) == 2 else []
    if not factors or any(name not in greatest for name in factors):
        return None
    rows = 1
    for name in factors:
        rows *= greatest[name]
    return rows


def _rank(graph: LintGraph, value: str) -> int | None:
    return len(graph.dims[value]) if value in graph.dims else None


def _attributes(node: NodeProto) -> dict[str, Any]:
    return {a.name: helper.get_attribute_value(a) for a in node.attribute}
