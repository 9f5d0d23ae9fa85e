"""The rules that keep engines fast: exported graphs keep them, and each has graphs that break it.

Where one rule is broken no other speaks, so that a finding names one cause.
"""

import shutil
from collections.abc import Callable
from pathlib import Path

import onnx
import onnx.inliner
import pytest
from onnx import TensorProto, helper, parser
from typer.testing import CliRunner

from graphs.__main__ import app
from graphs.contract.manifest import ENGINE_MODES, Profile
from graphs.contract.shapes import input_bounds
from graphs.contract.spec import GRAPHS, BuildError, BuildSpec, GraphName, Precision
from graphs.engines.lint import RULES, lint_build, lint_graph, lint_model
from graphs.engines.lint_rules.graph import Finding, LintGraph
from graphs.ops import DOMAIN, OPSET
from tests.support.builds import EACH_PRECISION, Build
from tests.support.graph_surgery import (
    change_body,
    insert_before,
    node_of,
    read_in_3d,
    replace_graph,
)

Surgery = Callable[[onnx.ModelProto], None]


def parse(text: str) -> onnx.ModelProto:
    """A model from ONNX's text form, in whose names a dot is written as two underscores."""
    opsets = f'["": {OPSET}, "{DOMAIN}": 1]'
    model = parser.parse_model(f"<ir_version: 10, opset_import: {opsets}> {text}")
    for value in model.graph.input:
        value.name = value.name.replace("__", ".")
    for node in model.graph.node:
        node.input[:] = [name.replace("__", ".") for name in node.input]
    return model


def exported(build: Path, name: GraphName) -> onnx.ModelProto:
    return onnx.load(build / "onnx" / f"{name}.onnx")


def findings(build: Path, name: GraphName, surgery: Surgery) -> list[Finding]:
    """The findings in k2-nano's graph after `surgery`."""
    model = exported(build, name)
    surgery(model)
    spec = BuildSpec.load(build).graphs[name]
    bounds = {mode: input_bounds(spec, mode, Profile()) for mode in ENGINE_MODES}
    return lint_graph(LintGraph.from_model(name, model, bounds))


def only(findings: list[Finding]) -> Finding:
    assert len(findings) == 1, [str(f) for f in findings]
    return findings[0]


@EACH_PRECISION
def test_exported_graphs_keep_every_rule(nano: Build, precision: Precision) -> None:
    assert lint_build(nano(precision)) == []


def test_every_rule_is_in_the_order_once() -> None:
    assert len(RULES) == len(set(RULES)) == 11


def test_a_linear_layer_that_reads_3_dimensions(nano: Build) -> None:
    """Only another product than Gemm reads them, so the rule on FP8 products speaks too."""
    finding, other = findings(
        nano("fp8"), "dense", lambda model: read_in_3d(model, "attention.o.weight")
    )
    linear = node_of(exported(nano("fp8"), "dense"), "FP8Linear", "attention.o.weight")
    assert (finding.rule, other.rule) == ("2-D linear activations", "FP8 products")
    assert (finding.graph, finding.node) == ("dense", f"{linear.name} (FP8Linear3D)")
    assert finding.fault.startswith(
        "attention.o.weight: expected an activation [tokens, in], got 3 dim"
    )
    assert "the whole matrix, 0.1 MB, is copied at every run" in finding.consequence


def test_a_16_bit_linear_layer_that_reads_3_dimensions(nano: Build) -> None:
    """lm_head as a MatMul of [1, rows, in] by [in, out]: the rule is not about FP8 alone."""

    def surgery(model: onnx.ModelProto) -> None:
        gemm = node_of(model, "Gemm")
        x, weight = gemm.input[0], gemm.input[1]
        axis = helper.make_tensor("axis", TensorProto.INT64, [1], [0])
        model.graph.initializer.append(axis)
        insert_before(
            model,
            gemm,
            [
                helper.make_node("Unsqueeze", [x, "axis"], ["x_3d"]),
                helper.make_node("Transpose", [weight], ["in_out"], perm=[1, 0]),
                helper.make_node("MatMul", ["x_3d", "in_out"], ["y_3d"], name="product"),
                helper.make_node("Squeeze", ["y_3d", "axis"], [gemm.output[0]]),
            ],
        )
        model.graph.node.remove(gemm)

    finding = only(findings(nano("fp8"), "head", surgery))
    assert (finding.rule, finding.node) == ("2-D linear activations", "product (MatMul)")
    assert "lm_head.weight" in finding.fault and "is copied" in finding.consequence


def stored_in_out(model: onnx.ModelProto) -> None:
    """attention.o stored [in, out] and transposed in the graph."""
    weight = next(i for i in model.graph.input if i.name == "attention.o.weight")
    first, second = weight.type.tensor_type.shape.dim
    first.dim_value, second.dim_value = second.dim_value, first.dim_value
    linear = node_of(model, "FP8Linear", weight.name)
    linear.input[1] = "out_in"
    transpose = helper.make_node("Transpose", [weight.name], ["out_in"], name="t", perm=[1, 0])
    insert_before(model, linear, [transpose])


def in_blocks_of_32(model: onnx.ModelProto) -> None:
    """Every FP8 weight dequantised in scale blocks of 32 rows."""
    change_body(model, "FP8Linear", (WEIGHT, WEIGHT.replace("<", "<axis = 0, block_size = 32, ")))


WEIGHT = "weight_e4m3 = DequantizeLinear<output_dtype = 1>(weight"


@pytest.mark.parametrize(
    ("surgery", "node", "fault"),
    [
        (
            stored_in_out,
            "t (Transpose)",
            "attention.o.weight: expected DequantizeLinear to read it, got Transpose",
        ),
        (
            in_blocks_of_32,
            "(FP8Linear)",
            "attention.qkv_a.weight: expected dequantisation by 1, got scale blocks of 32",
        ),
        (
            lambda model: change_body(
                model,
                "FP8Linear",
                ("weight_e4m3 = Deq", "turned = Deq"),
                (
                    "product = Gemm",
                    "back = Transpose<perm = [1, 0]>(turned)\n"
                    "weight_e4m3 = Transpose<perm = [1, 0]>(back)\nproduct = Gemm",
                ),
            ),
            "(FP8Linear)",
            "attention.qkv_a.weight: expected nothing between the matrix and its product, got Tr",
        ),
    ],
)
def test_an_fp8_weight_of_another_form(
    nano: Build, surgery: Surgery, node: str, fault: str
) -> None:
    every = findings(nano("fp8"), "dense", surgery)
    assert {f.rule for f in every} == {"FP8 products"}
    assert every[0].node.endswith(node) and every[0].fault.startswith(fault)
    assert "is widened at every run" in every[0].consequence


FP8_PRODUCT = """g (bfloat16[M,8] x, float8e4m3fn[16,8] w__weight, float[16] w__scale)
    => (float[M,16] y)
    { one = Constant<value_float = 1.0>()
      two = Constant<value_float = 2.0>()
      wide = Cast<to = 1>(x)
      q = QuantizeLinear<output_dtype = 17>(wide, one)
      d = DequantizeLinear<output_dtype = 1>(q, one)
      w = DequantizeLinear<output_dtype = 1>(w__weight, one)
      y = Gemm<transB = 1>(d, w) }"""


@pytest.mark.parametrize(
    ("old", "new", "fault"),
    [
        ("", "", None),
        (
            "output_dtype = 1>(w__weight, one)",
            "axis = 0, output_dtype = 1>(w__weight, w__scale)",
            "expected dequantisation by 1, got a scale w.scale",
        ),
        ("(w__weight, one)", "(w__weight, two)", "expected dequantisation by 1, got a scale two"),
        ("(q, one)", "(q, two)", "expected dequantisation by 1, got a scale two"),
        (
            "output_dtype = 1>(w__weight",
            "output_dtype = 16>(w__weight",
            "expected dequantisation to fp32, got BFLOAT16",
        ),
        (
            "float8e4m3fn[16,8]",
            "float8e4m3fn[3,16,8]",
            "expected [out, in], got 3 dimensions",
        ),
        (
            "Gemm<transB = 1>(d, w)",
            "Gemm<transB = 0>(d, w)",
            "expected Gemm with transB, which reads [out, in], got another product",
        ),
        ("(d, w)", "(wide, w)", "expected an activation dequantised from FP8, got Cast"),
    ],
)
def test_the_forms_of_an_fp8_weight(old: str, new: str, fault: str | None) -> None:
    """What compiles to an FP8 product, and what to one of 16 or 32 bits."""
    assert old in FP8_PRODUCT
    model = parse(FP8_PRODUCT.replace(old, new) if old else FP8_PRODUCT)
    every = lint_graph(LintGraph.from_model("g", model, {}))
    faults = [f.fault for f in every if f.rule == "FP8 products"]
    assert faults == ([f"w.weight: {fault}"] if fault else [])


def test_two_products_of_one_quantised_activation(nano: Build) -> None:
    """Slot 1 reads what slot 0 gathered; each still quantises for itself, as the bodies do."""

    def surgery(model: onnx.ModelProto) -> None:
        first = node_of(model, "FP8Linear", "slots.0.gate_up.weight")
        node_of(model, "FP8Linear", "slots.1.gate_up.weight").input[0] = first.input[0]

    finding = only(findings(nano("fp8"), "experts", surgery))
    second = node_of(exported(nano("fp8"), "experts"), "FP8Linear", "slots.1.gate_up.weight")
    assert (finding.rule, finding.node) == ("no shared Q/DQ", f"{second.name} (FP8Linear)")
    assert finding.fault.endswith("slots.0.gate_up.weight, slots.1.gate_up.weight")
    assert "concatenated at every run" in finding.consequence


def test_two_products_of_one_q_dq() -> None:
    text = FP8_PRODUCT.replace("w__scale)\n", "w__scale, float8e4m3fn[16,8] v__weight)\n", 1)
    text = text.replace(
        "y = Gemm<transB = 1>(d, w)",
        """v = DequantizeLinear<output_dtype = 1>(v__weight, one)
        yw = Gemm<transB = 1>(d, w)
        yv = Gemm<transB = 1>(d, v)
        y = Add(yw, yv)""",
    )
    finding = only(lint_graph(LintGraph.from_model("g", parse(text), {})))
    assert finding.rule == "no shared Q/DQ"
    assert finding.fault == (
        "x: expected 1 product of the quantised activation, got 2: w.weight, v.weight"
    )


def test_an_op_named_like_a_standard_one(nano: Build) -> None:
    def surgery(model: onnx.ModelProto) -> None:
        for op in (*model.graph.node, *model.functions):
            if isinstance(op, onnx.NodeProto) and op.op_type == "RoPE":
                op.op_type = "RotaryEmbedding"
            elif isinstance(op, onnx.FunctionProto) and op.name == "RoPE":
                op.name = "RotaryEmbedding"

    every = findings(nano("fp8"), "dense", surgery)
    assert [f.rule for f in every] == ["custom op names"] * 2  # queries and key
    rope = node_of(exported(nano("fp8"), "dense"), "RoPE")
    assert every[0].node == f"{rope.name} (RotaryEmbedding)"
    assert every[0].fault.endswith("got kimi::RotaryEmbedding, named like a standard operator")
    assert "picks an importer by the name alone" in every[0].consequence


def read_through(*nodes: onnx.NodeProto) -> Surgery:
    """Let attention read the last of these nodes' results in place of the cache."""

    def surgery(model: onnx.ModelProto) -> None:
        attention = node_of(model, "LatentAttention")
        attention.input[2] = nodes[-1].output[0]
        for name, value in (("zero", 0), ("all", 2**62), ("one", 1)):
            tensor = helper.make_tensor(name, TensorProto.INT64, [1], [value])
            model.graph.initializer.append(tensor)
        insert_before(model, attention, nodes)

    return surgery


def scatter(model: onnx.ModelProto) -> None:
    """New rows put into the cache, which is an output then."""
    node = helper.make_node(
        "TensorScatter", ["context", "new", "at"], ["context_out"], name="scatter", axis=1
    )
    model.graph.input.append(helper.make_tensor_value_info("at", TensorProto.INT64, ["batch"]))
    cache = next(i for i in model.graph.input if i.name == "context")
    output = model.graph.output.add()
    output.CopyFrom(cache)
    output.name = "context_out"
    model.graph.node.append(node)


def returned(model: onnx.ModelProto) -> None:
    cache = next(i for i in model.graph.input if i.name == "context")
    model.graph.output.add().CopyFrom(cache)


@pytest.mark.parametrize(
    ("surgery", "node", "fault"),
    [
        (
            read_through(
                helper.make_node("Slice", ["context", "zero", "all", "one"], ["part"], name="cut")
            ),
            "cut (Slice)",
            "context: expected MatMul to read it, got Slice",
        ),
        (
            read_through(
                helper.make_node("Transpose", ["context"], ["t"], name="turn", perm=[0, 2, 1]),
                helper.make_node("Transpose", ["t"], ["back"], name="again", perm=[0, 2, 1]),
            ),
            "turn (Transpose)",
            "context: expected MatMul to read it, got Transpose",
        ),
        (
            scatter,
            "scatter (TensorScatter)",
            "context: expected MatMul to read it, got TensorScatter",
        ),
        (returned, "context", "expected new rows alone as an output, got the whole cache"),
    ],
    ids=["slice", "transpose", "scatter", "output"],
)
def test_a_cache_that_is_not_only_read(
    nano: Build, surgery: Surgery, node: str, fault: str
) -> None:
    for name in ("dense", "moe"):
        broken = only(findings(nano("fp8"), name, surgery))
        assert (broken.rule, broken.node, broken.fault) == ("read-only cache", node, fault)
        assert "the valid cache is copied per layer and step" in broken.consequence


WHOLE = """
    wide_BHsT = Transpose<perm = [0, 2, 3, 1]>(wide_BTHs_1)
    soft_BHsT = Softmax<axis = -1>(wide_BHsT)
    soft_BTHs_1 = Transpose<perm = [0, 3, 1, 2]>(soft_BHsT)
"""
WRITTEN_OUT = """
    wide_BHsT = Transpose<perm = [0, 2, 3, 1]>(wide_BTHs_1)
    peak_BHs1 = ReduceMax(wide_BHsT, rest)
    below_BHsT = Sub(wide_BHsT, peak_BHs1)
    raised_BHsT = Exp(below_BHsT)
    total_BHs1 = ReduceSum(raised_BHsT, rest)
    soft_BHsT = Div(raised_BHsT, total_BHs1)
    soft_BTHs_1 = Transpose<perm = [0, 3, 1, 2]>(soft_BHsT)
"""


@pytest.mark.parametrize(
    ("softmax", "name"), [(WHOLE, "Softmax"), (WRITTEN_OUT, "ReduceMax")], ids=["whole", "out"]
)
@pytest.mark.parametrize("precision", ["fp32", "fp8"])
def test_keys_last_scores(nano: Build, precision: Precision, softmax: str, name: str) -> None:
    def surgery(model: onnx.ModelProto) -> None:
        change_body(
            model,
            "LatentAttention",
            (
                "soft_BTHs_1 = Div(raised_BTHs_1, total_B1Hs_1)",
                softmax,
            ),
        )

    finding = only(findings(nano(precision), "moe", surgery))
    attention = node_of(exported(nano(precision), "moe"), "LatentAttention")
    assert (finding.rule, finding.node) == (
        "keys-major scores",
        f"{attention.name} (LatentAttention)",
    )
    assert finding.fault.startswith(f"expected {name} over axis 1 of")
    assert "scores and cache are re-laid out" in finding.consequence


@pytest.mark.parametrize(
    ("weight", "change"),
    [
        ("w_uk", ("Transpose<perm = [1, 0, 2, 3]>(q_HBSC)", "MatMul(q_nope, w_uk)")),
        ("w_uv", ("Transpose<perm = [1, 0, 2, 3]>(o_HBSV)", "MatMul(mix_BHSC, w_uv)")),
    ],
)
def test_heads_inside_a_batch(nano: Build, weight: str, change: tuple[str, str]) -> None:
    finding = only(
        findings(nano("fp8"), "dense", lambda model: change_body(model, "LatentAttention", change))
    )
    attention = node_of(exported(nano("fp8"), "dense"), "LatentAttention")
    assert (finding.rule, finding.node) == (
        "heads as the batch",
        f"{attention.name} (LatentAttention)",
    )
    assert finding.fault.endswith("got a product of 4 by 3 dimensions")
    assert "copied once a sequence" in finding.consequence


@EACH_PRECISION
@pytest.mark.parametrize("name", GRAPHS)
def test_a_profile_of_one_row(nano: Build, precision: Precision, name: GraphName) -> None:
    build = nano(precision)
    spec = BuildSpec.load(build).graphs[name]
    bounds = {mode: input_bounds(spec, mode, Profile()) for mode in ENGINE_MODES}
    sizes = {"batch": 1, "tokens": 1, "rows": 1, "context": 9}
    sizes |= {f"rows_{slot}": 1 for slot in range(8)}
    one = {t.name: (t.shape(sizes),) * 3 for t in spec.inputs if t.name in bounds["decode"]}
    model = exported(build, name)
    finding = only(lint_graph(LintGraph.from_model(name, model, bounds | {"decode": one})))
    assert finding.rule == "no profile of one row"
    assert finding.node.endswith(("(FP8Linear)", "(Gemm)"))
    assert finding.fault.startswith("decode: expected a range up to 2 rows of ")
    assert "re-laid out at every run" in finding.consequence


def test_a_scatter_that_adds(nano: Build) -> None:
    def surgery(model: onnx.ModelProto) -> None:
        node_of(model, "ScatterND").attribute.append(helper.make_attribute("reduction", "add"))

    finding = only(findings(nano("fp8"), "experts", surgery))
    node = node_of(exported(nano("fp8"), "experts"), "ScatterND")
    assert (finding.rule, finding.node) == (
        "ScatterND without reduction",
        f"{node.name} (ScatterND)",
    )
    assert finding.fault.startswith(
        "expected no reduction, got add"
    ) and finding.consequence.startswith("TensorRT ref")


def test_nodes_of_one_name(nano: Build) -> None:
    """Functions inlined without naming their nodes, as onnx does it."""
    model = exported(nano("fp8"), "dense")
    flat = onnx.inliner.inline_local_functions(model)
    finding = only(lint_graph(LintGraph("dense", model, flat, {})))
    assert (finding.rule, finding.node) == ("unique node names", "nodes without a name")
    assert "names layers by node, and fails" in finding.consequence


def test_a_value_without_a_shape() -> None:
    model = parse("g (float[M,8] x) => (float[M,8] y) { h = kimi.Mystery(x)\n y = Neg(h) }")
    finding = only(lint_graph(LintGraph.from_model("g", model, {})))
    assert finding.rule == "shaped values"
    assert "h" in finding.fault and "no rule on shapes can be checked" in finding.consequence


def test_shapes_that_do_not_fit() -> None:
    text = """g (float[M,8] x, float[9,4] o__weight) => (float[M,4] y)
        { y = MatMul(x, o__weight) }"""
    finding = only(lint_graph(LintGraph.from_model("g", parse(text), {})))
    assert (finding.rule, finding.node) == ("shaped values", "g")
    assert "Incompatible dimensions" in finding.fault


def test_a_file_that_is_not_onnx() -> None:
    with pytest.raises(BuildError, match=r"head: expected an ONNX file, got.*export again"):
        lint_model("head", b"\xff" * 100, {})


def run_lint(build: Path) -> tuple[int, list[str]]:
    result = CliRunner().invoke(app, ["lint", str(build)])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.output.splitlines()


def test_the_command_warns_of_ranges_and_fails_on_a_broken_rule(
    nano: Build, tmp_path: Path
) -> None:
    build = Path(shutil.copytree(nano("fp8"), tmp_path / "fp8"))
    code, lines = run_lint(build)
    warnings = lines[:-1]
    assert code == 0 and all(line.startswith("warning: ") for line in warnings)
    assert any("moe_001_chunk: probabilities: fp16 flush: " in line for line in warnings)
    end = f"11 rules, 4 graphs, 0 errors; {len(warnings)} range warnings in 15 goldens"
    assert lines[-1] == f"{build}: {end}"

    shutil.rmtree(build / "golden")
    model = exported(build, "dense")
    read_in_3d(model, "attention.o.weight")
    replace_graph(build, "dense", model.SerializeToString())
    code, lines = run_lint(build)
    assert code == 1
    assert lines[0].startswith("error: dense: 2-D linear activations: node")
    assert lines[1].startswith("error: dense: FP8 products: node")
    assert lines[2:] == [
        f"{build}: 11 rules, 4 graphs, 2 errors; no goldens, so no ranges; make them with "
        "`python -m export golden`"
    ]
