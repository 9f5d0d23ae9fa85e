"""Where taps are found in the graphs, and how their layouts map to the reference's."""

import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphs.contract.spec import BuildSpec, TapSpec
from graphs.parity.taps import SYMBOLS, by_token, find_taps, to_graph, to_reference
from graphs.passes.inline import inline
from tests.support.builds import Build

B, H, S, V = 2, 3, 4, 5


def tap(
    axes: tuple[str, ...],
    dims: str,
    columns: tuple[int, int] | None = None,
    interleaved: bool = False,
) -> TapSpec:
    return TapSpec("mix", "mix", "value", (), axes, dims, columns, interleaved)


def test_axes_that_are_products_are_split_and_transposed() -> None:
    reference = np.arange(B * H * S * V).reshape(B, H, S, V)
    graph = reference.transpose(0, 2, 1, 3).reshape(B * S, H * V)
    rows = tap(("BS", "HV"), "BHSV")
    assert np.array_equal(to_reference(rows, graph, reference.shape), reference)
    assert np.array_equal(to_graph(rows, reference), graph)


def test_a_part_of_the_columns_is_cut_out() -> None:
    graph = np.arange(B * S * 8).reshape(B * S, 8)
    part = to_reference(tap(("BS", "Q"), "BSQ", columns=(2, 5)), graph, (B, S, 3))
    assert np.array_equal(part, graph.reshape(B, S, 8)[..., 2:5])


def test_half_layout_becomes_the_interleaved_one() -> None:
    graph = np.array([[0, 2, 4, 1, 3, 5]])
    part = to_reference(tap(("S", "R"), "SR", interleaved=True), graph, (1, 6))
    assert part.tolist() == [[0, 1, 2, 3, 4, 5]]


@given(st.permutations("BHSV"), st.integers(1, 3))
def test_there_and_back_is_the_same(dims: list[str], split: int) -> None:
    sizes = {"B": B, "H": H, "S": S, "V": V}
    value = np.random.default_rng(0).normal(size=[sizes[d] for d in dims])
    spec = tap(("BHSV"[:split], "BHSV"[split:]), "".join(dims))
    graph = to_graph(spec, value)
    assert graph.ndim == 2 and np.array_equal(to_reference(spec, graph, value.shape), value)


def test_a_token_is_a_row_whatever_the_layout() -> None:
    value = np.arange(B * H * S * V).reshape(B, H, S, V)
    rows = by_token(tap(("BS", "HV"), "BHSV"), value)
    assert rows is not None and rows.shape == (B * S, H * V)
    assert np.array_equal(rows[S + 1], value[1, :, 1].ravel())
    assert by_token(tap(("n", "D"), "nD"), value[0, 0]) is None  # an expert's rows


def test_the_spec_lists_taps_that_the_inlined_graphs_have(nano: Build) -> None:
    """By name where they are the graph's own, by the op's node where they are in its body."""
    build = nano("fp8")
    spec = BuildSpec.load(build)
    for graph in spec.graphs.values():
        model = onnx.load_from_string(spec.onnx_bytes(build, graph.name))
        values = {o for n in inline(model).graph.node for o in n.output}
        assert graph.taps and {t.value for t in graph.taps} <= values
        names = [t.name for t in graph.taps]
        assert len(set(names)) == len(names) and {t.name for t in graph.outputs} <= set(names)
        assert {n.rpartition(".")[2] for n in names} <= set(SYMBOLS)


def test_the_compiled_graph_has_no_output_for_a_tap(nano: Build) -> None:
    build = nano("fp32")
    model = onnx.load_from_string(BuildSpec.load(build).onnx_bytes(build, "dense"))
    assert [o.name for o in model.graph.output] == ["y", "new"]


def test_a_graph_that_does_not_read_a_weight_as_expected_is_an_error(nano: Build) -> None:
    build = nano("fp32")
    spec = BuildSpec.load(build)
    model = onnx.load_from_string(spec.onnx_bytes(build, "dense"))
    for node in model.graph.node:
        if "post_norm.weight" in node.input:
            node.input[1] = "attention.input_norm.weight"
    with pytest.raises(ValueError, match=r"dense: no node reads post_norm\.weight"):
        find_taps(model, spec.config)
    model.graph.name = "other"
    with pytest.raises(ValueError, match="'other': expected one of dense, moe, experts, head"):
        find_taps(model, spec.config)
