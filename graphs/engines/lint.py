"""Static rules over the graphs: what makes TensorRT copy weights or the cache, or refuse a graph.

The builder obeys whatever it is given. A graph that breaks one of these rules computes the same
numbers in ONNX Runtime and compiles without a word; what it costs shows only in the activation
memory, or on the GPU. So every rule is checked before TensorRT sees a graph, on the flat copy that
its parser gets, and a finding says which node, and what that would cost.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path

import onnx
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]

from graphs.contract.manifest import ENGINE_MODES, Bounds, EngineMode, Profile
from graphs.contract.shapes import input_bounds
from graphs.contract.spec import GRAPHS, BuildError, BuildSpec, GraphName
from graphs.engines.lint_rules.attention import heads_as_batch, keys_major_scores, read_only_cache
from graphs.engines.lint_rules.graph import Finding, LintGraph
from graphs.engines.lint_rules.linear import (
    fp8_products,
    no_profile_of_one_row,
    two_dimensional_activations,
    unshared_quantisation,
)
from graphs.engines.lint_rules.parser import (
    custom_op_names,
    scatter_without_reduction,
    shaped_values,
    unique_node_names,
)

Rule = Callable[[LintGraph], Iterator[Finding]]

RULES: tuple[Rule, ...] = (
    custom_op_names,
    unique_node_names,
    shaped_values,
    scatter_without_reduction,
    two_dimensional_activations,
    fp8_products,
    unshared_quantisation,
    no_profile_of_one_row,
    read_only_cache,
    keys_major_scores,
    heads_as_batch,
)


def lint_graph(graph: LintGraph) -> list[Finding]:
    """The findings of every rule, in order."""
    return [finding for rule in RULES for finding in rule(graph)]


def lint_build(
    build: Path, profile: Profile | None = None, graphs: Collection[GraphName] = GRAPHS
) -> list[Finding]:
    """The findings in a build folder's graphs, for the profiles that engines would have.

    Raises BuildError.
    """
    spec, profile = BuildSpec.load(build), profile or Profile()
    findings: list[Finding] = []
    for name in (name for name in GRAPHS if name in graphs):
        bounds = {mode: input_bounds(spec.graphs[name], mode, profile) for mode in ENGINE_MODES}
        findings += lint_model(name, spec.onnx_bytes(build, name), bounds)
    return findings


def lint_model(
    name: GraphName, content: bytes, bounds: Mapping[EngineMode, Mapping[str, Bounds]]
) -> list[Finding]:
    """The findings in one graph's file. Raises BuildError where it is no ONNX file."""
    try:
        model = onnx.load_from_string(content)
    except DecodeError as e:
        raise BuildError(f"{name}: expected an ONNX file, got other bytes; export again") from e
    return lint_graph(LintGraph.from_model(name, model, bounds))
