"""The passes over ONNX graphs: what each refuses, and numbers before and after."""

from typing import Any
from unittest import mock

import ml_dtypes
import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, parser

from graphs.contract.spec import BuildSpec, TapSpec
from graphs.contract.tensorfile import Array
from graphs.ops import DOMAIN, OPSET
from graphs.ops.fp8_linear import fp8_linear
from graphs.ops.rope import rope
from graphs.passes.attach_functions import attach_functions
from graphs.passes.expose_taps import expose_taps
from graphs.passes.feed_linears import feed_linears
from graphs.passes.infer_shapes import infer_shapes, unshaped
from graphs.passes.inline import inline
from graphs.passes.pointwise import pointwise
from graphs.passes.widen import widen
from graphs.session import open_session, run

BF16 = ml_dtypes.bfloat16


def parse(text: str) -> onnx.ModelProto:
    """A model of opset 24 and our domain from ONNX's text form."""
    opsets = f'["": {OPSET}, "{DOMAIN}": 1]'
    return parser.parse_model(f"<ir_version: 10, opset_import: {opsets}> {text}")


def run_onnx(model: onnx.ModelProto, inputs: dict[str, Array], output: Array) -> Array:
    """The model's only output, as ONNX Runtime computes it without any pass of ours."""
    session = open_session(BuildSpec("fp32", {}, "", {}), model.SerializeToString(), 1)
    run(session, inputs, {model.graph.output[0].name: output})
    return output


def relative(result: Array, expected: Array) -> float:
    """max|a−b| / max|b|."""
    a, b = result.astype(np.float64), expected.astype(np.float64)
    return float(np.abs(a - b).max() / np.abs(b).max())


def random(*shape: int, dtype: Any = np.float32) -> Array:
    generator = np.random.default_rng(shape)
    return generator.standard_normal(shape).astype(np.float32).astype(dtype)


# Two ropes in a row, the second on what the first gave: a function that is called twice.
TWO_ROPES = """twice (float[B,H,S,16] x, float[P,8] cos, float[P,8] sin, int64[B,S] at)
    => (float[B,H,S,16] y)
    { once = kimi.RoPE(x, cos, sin, at)
      y = kimi.RoPE(once, cos, sin, at) }"""


def two_ropes() -> tuple[onnx.ModelProto, dict[str, Array], Array]:
    """The model, its inputs, and what the reference makes of them."""
    angles = random(9, 8)
    inputs = {"x": random(2, 3, 4, 16), "cos": np.cos(angles), "sin": np.sin(angles)}
    inputs["at"] = np.arange(8, dtype=np.int64).reshape(2, 4)
    x, cos, sin, at = (torch.from_numpy(array) for array in inputs.values())
    expected = rope.reference(rope.reference(x, cos, sin, at), cos, sin, at)
    return parse(TWO_ROPES), inputs, expected.numpy()


def test_attach_functions_adds_one_body_per_op_and_computes_the_reference() -> None:
    model, inputs, expected = two_ropes()
    attached = attach_functions(model)
    assert [(f.domain, f.name) for f in attached.functions] == [(DOMAIN, "RoPE")]
    assert not model.functions  # the argument is as it was
    assert relative(run_onnx(attached, inputs, np.zeros_like(expected)), expected) <= 1e-6
    again = attach_functions(attached)
    assert again.SerializeToString() == attached.SerializeToString()


def gates(second: str, inputs: str = "h, w, b") -> onnx.ModelProto:
    """Two gates of one graph; the second one's attributes differ from the first one's as given.

    `inputs`: of the second.
    """
    first = {
        "k": "2",
        "n_group": "1",
        "topk_group": "1",
        "group_score": '"max"',
        "scoring": '"sigmoid"',
        "scaling": "2.5",
        "normalise": "1",
    }
    name, _, value = second.partition("=")
    texts = [
        ", ".join(f"{k} = {v}" for k, v in a.items())
        for a in (first, first | ({name: value} if name else {}))
    ]
    return parse(f"""gates (float[M,4] h, float[8,4] w, float[8] b)
        => (int64[M,2] e, float[M,2] p, int64[M,2] e2, float[M,2] p2)
        {{ e, p = kimi.TopKGate<{texts[0]}>(h, w, b)
           e2, p2 = kimi.TopKGate<{texts[1]}>({inputs}) }}""")


def test_attach_functions_takes_nodes_with_equal_attributes() -> None:
    assert [f.name for f in attach_functions(gates("")).functions] == ["TopKGate"]


@pytest.mark.parametrize("change", ["k=3", "scaling=2.0", 'scoring="softmax"'])
def test_attach_functions_refuses_nodes_that_need_different_bodies(change: str) -> None:
    name, value = change.replace('"', "'").split("=")
    with pytest.raises(
        ValueError, match=rf"TopKGate with 3 inputs and .*'{name}': {value}.*another"
    ):
        attach_functions(gates(change))


def test_attach_functions_refuses_nodes_of_which_one_leaves_an_input_out() -> None:
    with pytest.raises(ValueError, match=r"TopKGate with 2 inputs and .* while another .* has 3 "):
        attach_functions(gates("", inputs="h, w"))


def test_attach_functions_refuses_a_node_that_lacks_an_input() -> None:
    text = TWO_ROPES.replace("(x, cos, sin, at)", "(x, cos, sin)").replace(
        "(once, cos, sin, at)", "(once, cos, sin)"
    )
    with pytest.raises(ValueError, match=r"RoPE: expected inputs x, .*positions, got 3 of them"):
        attach_functions(parse(text))


def test_attach_functions_refuses_an_unknown_op() -> None:
    model = parse("unknown (float[2] x) => (float[2] y) { y = kimi.Swirl(x) }")
    with pytest.raises(ValueError, match="no custom op kimi::Swirl"):
        attach_functions(model)


def test_inline_leaves_standard_operators_with_names_of_their_own() -> None:
    model, inputs, expected = two_ropes()
    flat = inline(attach_functions(model))
    assert not flat.functions
    assert {node.domain for node in flat.graph.node} == {""}
    names = [node.name for node in flat.graph.node]
    values = [output for node in flat.graph.node for output in node.output]
    assert all(names) and len(set(names)) == len(names) > 4
    assert len(set(values)) == len(values)
    assert relative(run_onnx(flat, inputs, np.zeros_like(expected)), expected) <= 1e-6


THIRD = 0.33203125  # 16042 in the bits of bf16

# A bf16 layer whose input, weight, constant, initialiser and output are all bf16.
FP32 = "g (float[4,8] x) => (float[4,8] y) { y = Mul(x, x) }"
NARROW = """narrow (bfloat16[M,16] x, bfloat16[8,16] w, float[8] wide) => (bfloat16[M,8] y)
    <bfloat16[8] bias>
    { product = Gemm<transB = 1>(x, w)
      third = Constant<value = bfloat16[1] {16042}>()
      scaled = Mul(product, third)
      moved = Add(scaled, bias)
      shift = Cast<to = 16>(wide)
      y = Add(moved, shift) }"""


def narrow() -> tuple[onnx.ModelProto, dict[str, Array], Array]:
    """The model, its inputs, and what fp32 makes of them."""
    model = parse(NARROW)
    bias = random(8, dtype=BF16)
    model.graph.initializer.append(onnx.numpy_helper.from_array(bias, "bias"))
    quarters = [(np.round(4 * random(rows, 16)) / 4).astype(BF16) for rows in (5, 8)]
    inputs = {"x": quarters[0], "w": quarters[1], "wide": random(8)}  # sums exact in any order
    x, w, wide = (array.astype(np.float32) for array in inputs.values())
    return model, inputs, (x @ w.T) * THIRD + bias.astype(np.float32) + wide


def test_widen_1_keeps_the_types_of_inputs_and_outputs() -> None:
    model, _, _ = narrow()
    wide = widen(model)
    assert [(v.name, v.type) for v in wide.graph.input] == [
        (v.name, v.type) for v in model.graph.input
    ]
    assert [v.type.tensor_type.elem_type for v in wide.graph.output] == [TensorProto.BFLOAT16]
    casts = [
        n for n in wide.graph.node if n.op_type == "Cast" and n.name[:6] in ("widen_", "narrow")
    ]
    assert [(n.input[0], n.output[0]) for n in casts] == [
        ("x", "x_wide"),
        ("w", "w_wide"),
        ("y_wide", "y"),
    ]


def test_widen_2_makes_every_interior_value_fp32() -> None:
    model, _, _ = narrow()
    wide = widen(model)
    ends = {v.name for v in (*wide.graph.input, *wide.graph.output)}
    types = {v.name: v.type.tensor_type.elem_type for v in wide.graph.value_info}
    assert set(types) >= {"product", "third", "scaled", "moved", "shift"}
    assert {t for name, t in types.items() if name not in ends} == {TensorProto.FLOAT}
    assert {i.data_type for i in wide.graph.initializer} == {TensorProto.FLOAT}
    assert not unshaped(wide)


def test_widen_2_computes_what_fp32_does_and_rounds_the_output_only() -> None:
    """Before, ONNX Runtime's CPU provider refuses the model; after, it equals fp32 arithmetic."""
    model, inputs, expected = narrow()
    with pytest.raises(Exception, match=r"NOT_IMPLEMENTED"):
        run_onnx(model, inputs, np.zeros(expected.shape, BF16))
    result = run_onnx(widen(model), inputs, np.zeros(expected.shape, BF16))
    np.testing.assert_array_equal(result, expected.astype(BF16))


def test_the_rounded_form_rounds_each_value_where_it_is_computed() -> None:
    model, inputs, _ = narrow()
    result = run_onnx(widen(model, rounded=True), inputs, np.zeros((5, 8), BF16))
    x, w, wide = (array.astype(np.float32) for array in inputs.values())

    def rounded(array: Array) -> Array:
        return array.astype(BF16).astype(np.float32)

    bias = onnx.numpy_helper.to_array(model.graph.initializer[0]).astype(np.float32)
    moved = rounded(rounded(rounded(x @ w.T) * THIRD) + bias)
    np.testing.assert_array_equal(result, (moved + rounded(wide)).astype(BF16))
    assert (result != run_onnx(widen(model), inputs, np.zeros((5, 8), BF16))).any()


def test_the_rounded_form_rounds_an_output_that_is_read_and_no_value_that_was_only_moved() -> None:
    model = parse("""g (bfloat16[4,8] x) => (bfloat16[4,8] y, bfloat16[8,4] z)
        { y = Mul(x, x)
          turned = Transpose<perm = [1, 0]>(y)
          z = Add(turned, turned) }""")
    form = widen(model, rounded=True)
    casts = [n.input[0] for n in form.graph.node if n.op_type == "Cast" and "rounded" in n.input[0]]
    assert casts == ["y_unrounded", "z_unrounded"]
    assert not unshaped(form)
    assert widen(parse(FP32), rounded=True) == widen(parse(FP32))


def test_widen_3_keeps_the_rounding_to_fp8() -> None:
    model = parse("""fp8 (bfloat16[M,32] x, float8e4m3fn[8,32] w, float[8] s) => (float[M,8] y)
        { raw = kimi.FP8Linear(x, w, s)
          y = Cast<to = 1>(raw) }""")
    wide = widen(attach_functions(model))
    assert wide.graph.input[1].type.tensor_type.elem_type == TensorProto.FLOAT8E4M3FN
    quantised = [n for n in wide.graph.node if n.op_type == "QuantizeLinear"]
    assert [a.i for n in quantised for a in n.attribute if a.name == "output_dtype"] == [
        TensorProto.FLOAT8E4M3FN
    ]
    inputs = {"x": random(5, 32, dtype=BF16), "w": random(8, 32, dtype=ml_dtypes.float8_e4m3fn)}
    inputs["s"] = np.abs(random(8))
    x, w = (torch.from_numpy(inputs[k].astype(np.float32)) for k in "xw")
    weight, scale = w.to(torch.float8_e4m3fn), torch.from_numpy(inputs["s"])
    expected = fp8_linear.reference(x, weight, scale).numpy()
    result = run_onnx(wide, inputs, np.zeros((5, 8), np.float32))
    assert relative(result, expected) <= 1e-6
    assert relative(result, (x @ (w * scale[:, None]).T).numpy()) >= 1e-3


def test_widen_handles_an_output_that_other_nodes_read() -> None:
    model = parse("""both (bfloat16[4] x) => (bfloat16[4] y, bfloat16[4] z)
        { y = Add(x, x)
          z = Mul(y, x) }""")
    x, y, z = random(4, dtype=BF16), np.zeros(4, BF16), np.zeros(4, BF16)
    content = widen(model).SerializeToString()
    session = open_session(BuildSpec("fp32", {}, "", {}), content, 1)
    run(session, {"x": x}, {"y": y, "z": z})
    wide = x.astype(np.float32)
    np.testing.assert_array_equal(y, (2 * wide).astype(BF16))
    np.testing.assert_array_equal(z, (2 * wide * wide).astype(BF16))


def test_widen_only_inlines_what_has_no_bf16() -> None:
    model, inputs, expected = two_ropes()
    wide = widen(attach_functions(model))
    assert [n.op_type for n in wide.graph.node] == [
        n.op_type for n in inline(attach_functions(model)).graph.node
    ]
    assert relative(run_onnx(wide, inputs, np.zeros_like(expected)), expected) <= 1e-6


def test_infer_shapes_goes_through_functions() -> None:
    model, _, _ = two_ropes()
    inferred = infer_shapes(attach_functions(model))
    shapes = {
        v.name: [d.dim_param or d.dim_value for d in v.type.tensor_type.shape.dim]
        for v in inferred.graph.value_info
    }
    assert shapes == {"once": ["B", "H", "S", 16]}


def test_infer_shapes_refuses_a_value_without_a_shape() -> None:
    """A reshape to a rank that only the input's value would tell."""
    model = parse("""blind (float[4] x, int64[N] dims) => (float y)
        { shaped = Reshape(x, dims)
          y = ReduceSum<keepdims = 0>(shaped) }""")
    with pytest.raises(ValueError, match=r"blind: no shape for shaped \(1 in all\)"):
        infer_shapes(model)


def test_infer_shapes_refuses_a_model_that_contradicts_itself() -> None:
    model = parse("wrong (float[4] x) => (float[5] y) { y = Abs(x) }")
    with pytest.raises(Exception, match=r"[Ii]nference|[Ii]nferred"):
        infer_shapes(model)
    model = parse("wrong (float[4] x) => (float[4] y) { y = Abs(absent) }")
    with pytest.raises(onnx.checker.ValidationError, match="absent"):
        infer_shapes(model)


# Two linear layers with something between them.
TWO_LINEARS = """twice (bfloat16[M,8] x, float8e4m3fn[6,8] first, float[6] first_scale,
                        float8e4m3fn[4,6] second, float[4] second_scale) => (bfloat16[M,4] y)
    { a = kimi.FP8Linear(x, first, first_scale)
      b = Abs(a)
      y = kimi.FP8Linear(b, second, second_scale) }"""


FP8_CASE = {
    "x": random(5, 8, dtype=BF16),
    "first": random(6, 8, dtype=ml_dtypes.float8_e4m3fn),
    "first_scale": np.abs(random(6)) + 0.1,
    "second": random(4, 6, dtype=ml_dtypes.float8_e4m3fn),
    "second_scale": np.abs(random(4)) + 0.1,
}
BETWEEN = TapSpec("between", "|a|", "b", (), ("M", "F"), "MF")


def test_a_linear_layer_whose_input_is_a_tap_is_fed_it() -> None:
    """The tap still shows what the graph computed; a layer that reads no tap stays as it is."""
    model, spec = attach_functions(parse(TWO_LINEARS)), BuildSpec("fp8", {}, "", {})
    free = np.zeros((5, 4), BF16)
    run(open_session(spec, model.SerializeToString(), 1), FP8_CASE, {"y": free})
    fed_model, sources = feed_linears(expose_taps(model, [BETWEEN]), [BETWEEN])
    assert sources == {"fed.second": BETWEEN}
    session = open_session(spec, fed_model.SerializeToString(), 1)

    def fed(second: Array) -> tuple[Array, Array]:
        y = np.zeros((5, 4), BF16)
        taps = run(session, FP8_CASE | {"fed.second": second}, {"y": y}, ["tap.between"])
        return y, taps["tap.between"]

    anything = random(5, 6)
    y, between = fed(anything)
    assert (between >= 0).all() and between.std() > 0.1  # what the layers between computed, in fp32
    assert not np.array_equal(y, free)
    same, again = fed(between)
    assert np.array_equal(same, free) and np.array_equal(again, between)


def test_a_graph_without_fp8_linear_layers_is_fed_nothing() -> None:
    model, _, _ = two_ropes()
    assert feed_linears(model, []) == (model, {})


def test_exposed_taps_leave_the_graphs_outputs_as_they_were() -> None:
    """A tap is a value of the graph, one of an op's body, or an output itself."""
    model, spec = attach_functions(parse(TWO_LINEARS)), BuildSpec("fp8", {}, "", {})
    taps = [
        BETWEEN,
        TapSpec("scale", "s", "y", ("row_scale",), ("M", "F"), "MF"),
        TapSpec("y", "y", "y", (), ("M", "F"), "MF"),
    ]
    exposed = expose_taps(model, taps)
    assert [o.name for o in exposed.graph.output] == ["y", "tap.between", "tap.scale"]
    assert [len(n.output) for n in exposed.graph.node if n.op_type == "FP8Linear"] == [2, 2]
    before, after = np.zeros((5, 4), BF16), np.zeros((5, 4), BF16)
    run(open_session(spec, model.SerializeToString(), 1), FP8_CASE, {"y": before})
    session = open_session(spec, exposed.SerializeToString(), 1)
    values = run(session, FP8_CASE, {"y": after}, ["tap.between", "tap.scale"])
    assert np.array_equal(before, after)
    peaks = np.abs(values["tap.between"]).max(axis=1, keepdims=True)
    np.testing.assert_allclose(values["tap.scale"], peaks / 448, rtol=1e-6)
    assert "tap.between" not in {o.name for o in model.graph.output}


TWO_GEMMS = """
twice (float[M, 300] x, float[512, 300] up, float[300, 512] down) => (float[M, 300] y)
{
    h = Gemm<transB = 1>(x, up)
    y = Gemm<transB = 1>(h, down)
}
"""
GEMM_CASE = {"up": random(512, 300), "down": random(300, 512)}


def two_gemms(rows: Array, large: int, row_invariant: bool = False) -> Array:
    """y, where a weight of so many elements is large."""
    content = parse(TWO_GEMMS).SerializeToString()
    with mock.patch("graphs.passes.pointwise.LARGE", large):
        session = open_session(BuildSpec("fp32", {}, "", {}), content, 2, None, row_invariant)
    y = np.full((len(rows), 300), np.nan, np.float32)
    run(session, GEMM_CASE | {"x": rows}, {"y": y})
    return y


@pytest.mark.parametrize("rows", [1, 2, 5, 64, 65, 130])
def test_pointwise_1_convolutions_give_the_same(rows: int) -> None:
    x = random(rows, 300)
    before, after = (two_gemms(x, large) for large in (1 << 20, 1))
    np.testing.assert_allclose(after, before, rtol=0, atol=2e-6 * np.abs(before).max())
    if rows > 64:  # the Gemm itself
        assert np.array_equal(before, after)


def test_pointwise_1_is_not_where_a_row_must_not_depend_on_how_many_there_are() -> None:
    x = random(64, 300)
    whole = two_gemms(x, large=1, row_invariant=True)
    for rows in (2, 3, 8, 17, 40):
        assert np.array_equal(two_gemms(x[:rows], large=1, row_invariant=True), whole[:rows])
    assert not np.array_equal(two_gemms(x[:8], large=1), whole[:8])  # other kernels, else


def test_pointwise_2_other_products_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A small weight; one that is made; one as it lies; a product with a factor or a sum."""
    model = parse(TWO_GEMMS)
    assert pointwise(model) == model
    monkeypatch.setattr("graphs.passes.pointwise.LARGE", 1)
    assert [n.op_type for n in pointwise(model).graph.node].count("If") == 2
    for line in (
        "w = Neg(up) h = Gemm<transB = 1>(x, w)",
        "h = Gemm<transB = 0>(x, down)",
        "h = Gemm<transB = 1, alpha = 2.0>(x, up)",
        "s = Constant<value_floats = [1.0]>() h = Gemm<transB = 1>(x, up, s)",
    ):
        other = parse(TWO_GEMMS.replace("h = Gemm<transB = 1>(x, up)", line))
        assert [n.op_type for n in pointwise(other).graph.node].count("If") == 1
