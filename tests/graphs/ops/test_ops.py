"""Each custom op's ONNX body, run by plain ONNX Runtime, against its torch reference.

bf16 and FP8 bodies are run in their widened form, since the CPU provider has no bf16 arithmetic.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import onnx.defs
import pytest
import torch
from onnx import TensorProto, helper
from torch import Tensor, nn

from export.checkpoint.block_fp8 import channels_from_wide
from export.checkpoint.open import Checkpoint
from export.golden.rounded import RoundedLinear, round_bf16, rounded_reference
from export.packing.layer_weights import to_numpy
from export.reference.attention import Attention, LatentRows, Taps, causal_mask
from export.reference.rope import rope_tables
from graphs.contract.config import ModelConfig
from graphs.contract.spec import BuildSpec, Precision
from graphs.ops import DOMAIN, MASKED, OPSET, CustomOp
from graphs.ops.fp8_linear import fp8_linear
from graphs.ops.latent_attention import latent_attention
from graphs.ops.rope import rope
from graphs.ops.topk_gate import topk_gate
from graphs.parity.compare import relative_rms
from graphs.passes.attach_functions import OPS, attach_functions
from graphs.session import open_session, run
from tests.support.builds import NANO
from tests.support.helpers import random_state, tiny_config

CONFIG = ModelConfig.from_dict(tiny_config())
TYPES = {
    torch.float32: TensorProto.FLOAT,
    torch.bfloat16: TensorProto.BFLOAT16,
    torch.float8_e4m3fn: TensorProto.FLOAT8E4M3FN,
    torch.int64: TensorProto.INT64,
}


def one_node(op: CustomOp, inputs: tuple[Tensor, ...], **attributes: Any) -> onnx.ModelProto:
    """A model of this node alone, with its body; what is bf16 comes out as fp32, unrounded."""
    outputs = op.outputs(*inputs, **attributes)
    names = [f"out_{i}" for i in range(len(outputs))]
    nodes = [
        helper.make_node(
            op.name,
            [f"in_{i}" for i in range(len(inputs))],
            [f"{n}_raw" for n in names],
            domain=DOMAIN,
            **attributes,
        )
    ]
    results = []
    for name, (shape, dtype) in zip(names, outputs, strict=True):
        to = TensorProto.FLOAT if dtype == torch.bfloat16 else TYPES[dtype]
        nodes.append(helper.make_node("Cast", [f"{name}_raw"], [name], to=to))
        results.append(helper.make_tensor_value_info(name, to, shape))
    graph = helper.make_graph(
        nodes,
        op.name,
        [
            helper.make_tensor_value_info(f"in_{i}", TYPES[t.dtype], t.shape)
            for i, t in enumerate(inputs)
        ],
        results,
    )
    opsets = [helper.make_opsetid("", OPSET), helper.make_opsetid(DOMAIN, 1)]
    return attach_functions(helper.make_model(graph, opset_imports=opsets, ir_version=10))


def run_body(op: CustomOp, *inputs: Tensor, **attributes: Any) -> list[Tensor]:
    """The outputs of the op's body in ONNX Runtime, widened where an input is bf16."""
    model = one_node(op, inputs, **attributes)
    narrow = any(t.dtype == torch.bfloat16 for t in inputs)
    precision: Precision = "bf16" if narrow else "fp32"
    spec = BuildSpec(precision, {}, "", {})
    session = open_session(spec, model.SerializeToString(), threads=1)
    outputs = {
        value.name: np.zeros(
            [d.dim_value for d in value.type.tensor_type.shape.dim],
            helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type),
        )
        for value in model.graph.output
    }
    run(session, {f"in_{i}": to_numpy(t) for i, t in enumerate(inputs)}, outputs)
    return [torch.from_numpy(array) for array in outputs.values()]


def close(result: Tensor, expected: Tensor, tolerance: float = 1e-6) -> None:
    """max|a−b| ≤ tolerance · max|b|."""
    assert result.shape == expected.shape and torch.isfinite(result).all()
    error, peak = (result - expected).abs().max(), expected.abs().max()
    assert error <= tolerance * peak, f"max error {float(error):.2e} of {float(peak):.2e}"


def test_no_op_shares_its_name_with_a_standard_one() -> None:
    """TensorRT's parser picks an importer by the name alone."""
    standard = {schema.name for schema in onnx.defs.get_all_schemas()}
    assert set(OPS) == {"RoPE", "LatentAttention", "FP8Linear", "TopKGate"}
    assert not standard & set(OPS)
    assert all(op.name == name for name, op in OPS.items())


def test_bodies_use_standard_operators_only() -> None:
    calls: list[tuple[CustomOp, int, dict[str, Any]]] = [
        (rope, 4, {}),
        (fp8_linear, 3, {}),
        (latent_attention, 4, {"scale": 1.0}),
        (topk_gate, 3, GATE | {"n_group": 4, "topk_group": 2}),
        (topk_gate, 2, GATE),
    ]
    for op, inputs, attributes in calls:
        function = onnx.parser.parse_function(op.body(inputs, **attributes))
        assert {node.domain for node in function.node} == {""}
        assert [(o.domain, o.version) for o in function.opset_import] == [("", OPSET)]


@pytest.mark.parametrize("heads", [1, 3])
def test_rope_body(heads: int) -> None:
    torch.manual_seed(0)
    cos, sin = rope_tables(CONFIG)
    x, positions = torch.randn(2, heads, 5, 16), torch.randint(0, 512, (2, 5))
    close(run_body(rope, x, cos, sin, positions)[0], rope.reference(x, cos, sin, positions))


def test_rope_body_turns_bf16_in_fp32() -> None:
    """Only the result is rounded, by the cast that the widened form leaves out."""
    torch.manual_seed(0)
    cos, sin = rope_tables(CONFIG)
    x, positions = torch.randn(1, 2, 3, 16).bfloat16(), torch.tensor([[0, 17, 511]])
    expected = rope.reference(x.float(), cos, sin, positions)
    close(run_body(rope, x, cos, sin, positions)[0], expected)
    assert torch.equal(rope.reference(x, cos, sin, positions), expected.bfloat16())


def attention_inputs(cached: int, new: int) -> list[Tensor]:
    """Queries, context, new rows, W_UK, W_UV, and positions by which sequence 1 has half as many
    cached rows as sequence 0.
    """
    torch.manual_seed(cached)
    H, N, R, C, V = 3, 24, 16, 56, 20
    positions = torch.tensor([[cached], [cached // 2]]) + torch.arange(new)
    sizes = [(2, H, new, N), (2, H, new, R), (2, cached, C + R), (2, new, C + R)]
    weights = [torch.randn(H, N, C) / N**0.5, torch.randn(H, C, V) / C**0.5]
    return [*(torch.randn(size) for size in sizes), *weights, positions]


@pytest.mark.parametrize("cached", [0, 1, 6])
@pytest.mark.parametrize("new", [1, 2, 4, 11])
def test_latent_attention_body(cached: int, new: int) -> None:
    """No context, a context of unequal lengths; fewer tokens than blocks of queries, and more."""
    inputs = attention_inputs(cached, new)
    expected = latent_attention.reference(*inputs, scale=0.2)
    close(run_body(latent_attention, *inputs, scale=0.2)[0], expected, 2e-6)


def test_latent_attention_body_reads_bf16() -> None:
    *wide, positions = attention_inputs(6, 4)
    inputs = [*(t.bfloat16() for t in wide), positions]
    rounded = [t.bfloat16().float() for t in wide]
    expected = latent_attention.reference(*rounded, positions, scale=0.2)
    close(run_body(latent_attention, *inputs, scale=0.2)[0], expected, 2e-6)
    close(latent_attention.reference(*inputs, scale=0.2).float(), expected, 3e-2)


FORMS = [
    latent_attention.reference,
    lambda *inputs, **attributes: run_body(latent_attention, *inputs, **attributes)[0],
]


@pytest.mark.parametrize("attend", FORMS, ids=["reference", "body"])
def test_case_11_a_token_sees_what_stands_before_it(attend: Callable[..., Tensor]) -> None:
    """6 new tokens on 5 cached, in a stride of 8: query i sees keys 0 … 5+i, and no row behind
    them. Seen is what changes the result.
    """
    inputs = attention_inputs(8, 6)
    inputs[-1] = torch.tensor([[5], [5]]) + torch.arange(6)
    before = attend(*inputs, scale=0.2)
    seen = torch.zeros(8 + 6, 6, dtype=torch.bool)
    for key in range(8 + 6):
        changed = [t.clone() for t in inputs]
        rows, at = (changed[2], key) if key < 8 else (changed[3], key - 8)
        rows[:, at] += 3.0
        differs = attend(*changed, scale=0.2) != before
        seen[key] = differs[0].any(-1).any(0)
        assert torch.equal(differs[1].any(-1).any(0), seen[key])
    expected = torch.ones(8 + 6, 6, dtype=torch.bool)
    expected[5:8] = False
    expected[8:] = torch.ones(6, 6).triu().bool()
    assert torch.equal(seen, expected)


@pytest.mark.parametrize("attend", FORMS, ids=["reference", "body"])
def test_rows_behind_a_sequence_have_no_weight(attend: Callable[..., Tensor]) -> None:
    """Whatever finite values stand there."""
    q_nope, q_pe, context, new, w_uk, w_uv, positions = attention_inputs(6, 4)
    before = attend(q_nope, q_pe, context, new, w_uk, w_uv, positions, scale=0.2)
    context[1, 3:] = 1e4  # behind sequence 1's length
    after = attend(q_nope, q_pe, context, new, w_uk, w_uv, positions, scale=0.2)
    assert torch.isfinite(after).all() and torch.equal(before, after)
    assert math.isfinite(torch.tensor(MASKED).bfloat16().item())
    assert torch.isfinite(torch.tensor(MASKED).bfloat16() * 2)


def test_latent_attention_equals_the_readable_absorbed_form() -> None:
    torch.manual_seed(0)
    state, prefix = random_state(CONFIG), "model.layers.0.self_attn."
    attention = Attention(CONFIG).requires_grad_(False)
    attention.load_state_dict(
        {k.removeprefix(prefix): v for k, v in state.items() if k.startswith(prefix)}
    )
    cache = LatentRows(torch.randn(2, 7, 56), torch.randn(2, 7, 16), "absorbed")
    context, taps = cache.rows(), Taps()
    tables = [table[7:11].expand(2, -1, -1) for table in rope_tables(CONFIG)]
    mask = causal_mask(4, 7, torch.float32)
    attention(torch.randn(2, 4, 160), *tables, mask, cache, taps)
    w_uk, w_uv = attention.up_projections()
    inputs = [
        taps["q_nope"],
        taps["q_pe_rotated"],
        context,
        torch.cat([taps["c_kv_normed"], taps["k_pe_rotated"]], dim=-1),
        w_uk,
        w_uv.transpose(1, 2).contiguous(),
        torch.arange(7, 11).expand(2, -1).contiguous(),
    ]
    mix = latent_attention.reference(*inputs, scale=CONFIG.softmax_scale)
    close(mix, taps["mix"], 2e-6)
    close(run_body(latent_attention, *inputs, scale=CONFIG.softmax_scale)[0], taps["mix"], 2e-6)


def fp8_inputs(rows: int) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(rows)
    channels = channels_from_wide(torch.randn(72, 160) * torch.linspace(0.001, 10, 72)[:, None])
    return torch.randn(rows, 160).bfloat16(), channels.weight, channels.scale


@pytest.mark.parametrize("rows", [1, 2, 7])
def test_fp8_linear_body(rows: int) -> None:
    """Case 17: one row is the least that a graph is given. Rounding to FP8 is part of the op."""
    x, weight, scale = fp8_inputs(rows)
    expected = fp8_linear.reference(x.float(), weight, scale)
    close(run_body(fp8_linear, x, weight, scale)[0], expected)
    unrounded = x.float() @ (weight.float() * scale[:, None]).T
    assert (expected - unrounded).norm() > 0.01 * unrounded.norm()


def test_every_linear_layer_gives_what_the_reference_gives_for_its_input() -> None:
    """Of k2-nano; stored in bf16, too, where the reference is rounded once."""
    model = rounded_reference(Checkpoint.open(NANO), "fp8")
    calls: dict[str, tuple[RoundedLinear, Tensor]] = {}

    def note(name: str) -> Callable[[nn.Module, tuple[Tensor]], None]:
        def hook(module: nn.Module, inputs: tuple[Tensor]) -> None:
            assert isinstance(module, RoundedLinear)
            calls[name] = module, inputs[0].reshape(-1, inputs[0].shape[-1])

        return hook

    linears = {n: m for n, m in model.named_modules() if isinstance(m, RoundedLinear)}
    for name, module in linears.items():
        module.register_forward_pre_hook(note(name))
    with torch.inference_mode():
        model(torch.arange(32)[None] * 7)
    config = model.config
    moe = config.num_hidden_layers - config.first_k_dense_replace
    assert len([n for n in calls if ".experts." not in n]) == len(linears) - 3 * moe * (
        config.n_routed_experts
    )
    for name, (module, given) in calls.items():
        x = round_bf16(given) if module.bf16_input else given
        weight = module.weight.to(torch.float8_e4m3fn)
        expected = fp8_linear.reference(x, weight, module.scale)
        (y,) = run_body(fp8_linear, x, weight, module.scale)
        stored = relative_rms(y.bfloat16().float().numpy(), expected.bfloat16().float().numpy())
        assert relative_rms(y.numpy(), expected.numpy()) <= 5e-7, name
        assert stored <= 1e-4, name


def test_fp8_linear_keeps_zeros_and_never_overflows() -> None:
    """Case 16: a row of zeros, one with 1e6, one of the largest bf16, one of the smallest."""
    x, weight, scale = fp8_inputs(5)
    x[0], x[2, 7] = 0, 1e6
    x[3], x[4] = torch.finfo(torch.bfloat16).max / 1e4, 1e-38
    expected = fp8_linear.reference(x.float(), weight, scale)
    result = run_body(fp8_linear, x, weight, scale)[0]
    for y in (result, expected):
        assert torch.isfinite(y).all() and (y[0] == 0).all()
    for row in (1, 2, 3):
        close(result[row], expected[row])
    # beside 1e6 nothing below half of 448's smallest subnormal is left, but the peak is exact
    product = x[2, 7].float() * weight[:, 7].float() * scale
    assert ((expected[2] - product).norm() / product.norm()) < 0.01
    assert (result[4].abs() <= 1e-33).all()


def test_fp8_linear_scales_each_row_by_its_own_peak() -> None:
    """A row's result does not depend on its neighbours."""
    x, weight, scale = fp8_inputs(7)
    x[3] *= 1000
    whole = run_body(fp8_linear, x, weight, scale)[0]
    for row in range(7):
        close(run_body(fp8_linear, x[row : row + 1], weight, scale)[0][0], whole[row])


GATE: dict[str, Any] = {
    "k": 3,
    "n_group": 1,
    "topk_group": 1,
    "group_score": "top2_sum",
    "scoring": "sigmoid",
    "scaling": 2.827,
    "normalise": 1,
}


def gate_inputs(experts: int = 8) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(40, 160), torch.randn(experts, 160) / 160**0.5, torch.randn(experts) * 0.1


def gate_in_loops(
    h: Tensor, weight: Tensor, bias: Tensor | None = None, **a: Any
) -> tuple[Tensor, Tensor]:
    """The gate's rule token by token, in fp64: experts ascending, and their weights."""
    all_experts, all_weights = [], []
    for logits in h.double() @ weight.double().T:
        scores = logits.sigmoid() if a["scoring"] == "sigmoid" else logits.softmax(0)
        choice = scores if bias is None else scores + bias.double()
        size = len(choice) // a["n_group"]
        count = 2 if a["group_score"] == "top2_sum" else 1
        of_group = [float(group.topk(count).values.sum()) for group in choice.split(size)]
        kept = sorted(range(len(of_group)), key=lambda g: -of_group[g])[: a["topk_group"]]
        candidates = [e for e in range(len(choice)) if e // size in kept]
        chosen = sorted(sorted(candidates, key=lambda e: -float(choice[e]))[: a["k"]])
        weights = scores[chosen]
        if a["normalise"]:
            weights = weights / weights.sum()
        all_experts.append(torch.tensor(chosen))
        all_weights.append((weights * a["scaling"]).float())
    return torch.stack(all_experts), torch.stack(all_weights)


def ascending(experts: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    order = experts.argsort(dim=-1)
    return experts.gather(-1, order), weights.gather(-1, order)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"normalise": 0},
        {"scoring": "softmax"},
        {"scoring": "softmax", "normalise": 0, "scaling": 1.0},
        {"n_group": 4, "topk_group": 2},
        {"n_group": 4, "topk_group": 2, "group_score": "max", "scoring": "softmax"},
        {"n_group": 2, "topk_group": 1, "k": 4},
        {"k": 8, "scaling": 1e-5},
    ],
    ids=str,
)
@pytest.mark.parametrize("inputs", [3, 2], ids=["bias", "no bias"])
def test_topk_gate_body_and_reference_follow_the_rule(inputs: int, changes: dict[str, Any]) -> None:
    """Case 7: softmax scores are not sigmoid ones."""
    tensors, attributes = gate_inputs()[:inputs], GATE | changes
    experts, weights = gate_in_loops(*tensors, **attributes)
    for outputs in (
        topk_gate.reference(*tensors, **attributes),
        run_body(topk_gate, *tensors, **attributes),
    ):
        result_experts, result_weights = ascending(*outputs)
        assert torch.equal(result_experts, experts)
        torch.testing.assert_close(result_weights, weights, rtol=2e-6, atol=0)


def test_softmax_scores_of_logits_far_apart_are_finite() -> None:
    """Logits of ±300: their exponentials alone would overflow fp32."""
    logits = torch.tensor([300.0, 299.0, 298.0, -300.0])
    inputs, attributes = (torch.ones(1, 1), logits[:, None]), GATE | {"scoring": "softmax"}
    expected = (logits[:3].double().softmax(0) * 2.827).float()
    for outputs in (
        topk_gate.reference(*inputs, **attributes),
        run_body(topk_gate, *inputs, **attributes),
    ):
        experts, weights = ascending(*outputs)
        assert experts.tolist() == [[0, 1, 2]]
        torch.testing.assert_close(weights[0], expected, rtol=2e-6, atol=0)


def test_the_two_group_scores_differ() -> None:
    """Group 0 has the best expert, group 1 the best pair."""
    weight, attributes = torch.zeros(8, 4), GATE | {"n_group": 4, "topk_group": 1, "k": 2}
    weight[:, 0] = torch.tensor([4.0, -4.0, 2.0, 2.0, -9.0, -9.0, -9.0, -9.0])
    inputs = torch.eye(1, 4), weight, torch.zeros(8)
    for group_score, chosen in (("top2_sum", {2, 3}), ("max", {0, 1})):
        changed = attributes | {"group_score": group_score}
        for experts, _ in (
            topk_gate.reference(*inputs, **changed),
            run_body(topk_gate, *inputs, **changed),
        ):
            assert set(experts[0].tolist()) == chosen


def test_a_barred_group_loses_to_negative_scores() -> None:
    """Case 5: with a bias of −2 a 0 in place of −inf would win."""
    h, weight, _ = gate_inputs()
    attributes = GATE | {"n_group": 4, "topk_group": 2}
    inputs = h, weight, torch.full((8,), -2.0)
    expected, _ = gate_in_loops(*inputs, **attributes)
    for outputs in (
        topk_gate.reference(*inputs, **attributes),
        run_body(topk_gate, *inputs, **attributes),
    ):
        assert torch.equal(ascending(*outputs)[0], expected)


@pytest.mark.parametrize("normalise", [0, 1])
def test_a_bias_of_12_does_not_erase_a_sigmoid_of_minus_18(normalise: int) -> None:
    """Case 6."""
    bias = torch.tensor([12.0] * 3 + [-12.0] * 5)
    logits = torch.tensor([-18.0, -18.5, -30.0] + [-18.0] * 5)
    inputs, attributes = (torch.ones(2, 1), logits[:, None], bias), GATE | {"normalise": normalise}
    scores = logits[:3].double().sigmoid()
    expected = (scores / (scores.sum() if normalise else 1) * 2.827).float()
    for outputs in (
        topk_gate.reference(*inputs, **attributes),
        run_body(topk_gate, *inputs, **attributes),
    ):
        experts, weights = ascending(*outputs)
        assert experts.tolist() == [[0, 1, 2]] * 2
        torch.testing.assert_close(weights, expected.expand(2, 3), rtol=1e-6, atol=0)
