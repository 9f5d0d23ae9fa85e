"""Rules on graphs that TensorRT's parser refuses, or takes for something else."""

from collections import Counter
from collections.abc import Iterator

import onnx.defs
from onnx import helper

from graphs.engines.lint_rules.graph import Finding, LintGraph
from graphs.passes.infer_shapes import unshaped

STANDARD = frozenset(s.name for s in onnx.defs.get_all_schemas_with_history() if s.domain == "")


def custom_op_names(graph: LintGraph) -> Iterator[Finding]:
    """No op of another domain is named like a standard one."""
    for node in graph.exported.graph.node:
        if node.domain not in ("", "ai.onnx") and node.op_type in STANDARD:
            yield graph.finding(
                "custom op names",
                f"{node.name} ({node.op_type})",
                f"expected a name of its own, got {node.domain}::{node.op_type}, named like a "
                "standard operator",
                "TensorRT's parser picks an importer by the name alone, and the op's body is lost",
            )


def scatter_without_reduction(graph: LintGraph) -> Iterator[Finding]:
    """ScatterND only replaces."""
    for node in graph.flat.graph.node:
        if node.op_type != "ScatterND":
            continue
        values = {a.name: helper.get_attribute_value(a) for a in node.attribute}
        reduction = values.get("reduction", b"none").decode()
        if reduction != "none":
            yield graph.finding(
                "ScatterND without reduction",
                node,
                f"expected no reduction, got {reduction}: use Gather, Add, then ScatterND",
                "TensorRT refuses the graph",
            )


def unique_node_names(graph: LintGraph) -> Iterator[Finding]:
    """Every node of the flat graph has a name that no other has."""
    counts = Counter(node.name for node in graph.flat.graph.node)
    for name, count in counts.items():
        if count > 1:
            yield graph.finding(
                "unique node names",
                name or "nodes without a name",
                f"expected 1 node of this name after inlining, got {count}",
                "TensorRT's parser names layers by node, and fails",
            )


def shaped_values(graph: LintGraph) -> Iterator[Finding]:
    """Every value of the flat graph has a type and a rank."""
    rule = "shaped values"
    consequence = "no rule on shapes can be checked, and TensorRT may refuse the graph"
    if graph.shape_error:
        yield graph.finding(rule, graph.name, graph.shape_error, consequence)
        return
    for value in unshaped(graph.inferred):
        node = graph.producers[value]
        yield graph.finding(rule, node, f"{value}: expected a shape, got none", consequence)
