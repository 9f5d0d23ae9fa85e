"""Attention over the latent cache: what makes the builder copy the cache, or W_UK and W_UV."""

from collections.abc import Iterator

from onnx import NodeProto

from graphs.engines.lint_rules.graph import LAYOUT, Finding, LintGraph

CONTEXT = "context"  # the cache, an input of the blocks' graphs
_SCORE_OPS = LAYOUT | {"Add", "Concat", "Div", "Mul", "Sub", "Where"}
_SOFTMAX_OPS = {"Softmax", "ReduceMax"}  # whole, or written out, beginning with the peak


def read_only_cache(graph: LintGraph) -> Iterator[Finding]:
    """Matrix products read the cache as it lies; nothing else does, and it is no output."""
    rule = "read-only cache"
    consequence = (
        "the valid cache is copied per layer and step (measured for K2 and 8 × 4,096 rows: 47 MB "
        "of scratch instead of 13.6 MB for a slice, 54 MB instead of 13.8 MB for a scatter)"
    )
    for node in graph.readers(CONTEXT):
        if node.op_type not in ("MatMul", "Shape"):
            yield graph.finding(
                rule,
                node,
                f"{CONTEXT}: expected MatMul to read it, got {node.op_type}",
                consequence,
            )
    if CONTEXT in (output.name for output in graph.flat.graph.output):
        fault = "expected new rows alone as an output, got the whole cache"
        yield graph.finding(rule, CONTEXT, fault, consequence)


def keys_major_scores(graph: LintGraph) -> Iterator[Finding]:
    """Scores are [batch, keys, …], with the softmax, or the peak it begins with, over axis 1."""
    for node in _softmaxes(graph):
        rank = len(graph.dims.get(node.input[0], ()))
        axis = _axis(graph, node)
        if rank and (rank == 2 or axis % rank != 1):
            yield graph.finding(
                "keys-major scores",
                node,
                f"expected {node.op_type} over axis 1 of [batch, keys, …], got axis {axis} of "
                f"{rank} dimensions",
                "scores and cache are re-laid out at every run (measured for K2 and 8 × 4,096 "
                "rows: 98 MB of scratch instead of 13.6 MB where the product is keys-last too)",
            )


def heads_as_batch(graph: LintGraph) -> Iterator[Finding]:
    """W_UK and W_UV, [heads, in, out], multiply [heads, rows, in]."""
    for product in graph.products:
        ranks = [len(graph.dims.get(value, ())) for value in product.node.input[:2]]
        if len(graph.dims[product.weight]) == 3 and 0 not in ranks and ranks != [3, 3]:
            yield graph.finding(
                "heads as the batch",
                product.node,
                f"{product.weight}: expected [heads, rows, in] by [heads, in, out], got a product "
                f"of {ranks[0]} by {ranks[1]} dimensions",
                f"the weight, {graph.weights[product.weight] / 1e6:.1f} MB, is copied once a "
                "sequence (measured for K2 and 8 sequences: 85 MB of scratch instead of 13.6 MB)",
            )


def _axis(graph: LintGraph, node: NodeProto) -> int:
    """The axis of a softmax or a reduction: an attribute or a constant, else the last one."""
    made = graph.producers.get(node.input[1]) if len(node.input) > 1 else None
    attributes = made.attribute if made is not None else node.attribute
    for attribute in attributes:
        if attribute.name in ("axis", "value_ints"):
            return int(attribute.ints[0] if attribute.ints else attribute.i)
    return -1


def _softmaxes(graph: LintGraph) -> list[NodeProto]:
    """Softmaxes of scores over the cache: reached from products that read it, none between."""
    pending = [n for n in graph.readers(CONTEXT) if n.op_type == "MatMul"]
    softmaxes: dict[str, NodeProto] = {}
    seen: set[str] = set()
    while pending:
        node = pending.pop()
        if node.output[0] in seen:
            continue
        seen.add(node.output[0])
        for reader in graph.readers(node.output[0]):
            if reader.op_type in _SOFTMAX_OPS:
                softmaxes[reader.output[0]] = reader
            elif reader.op_type in _SCORE_OPS:
                pending.append(reader)
    return list(softmaxes.values())
