"""LatentAttention: absorbed MLA over cached and new latent rows.

    LatentAttention(q_nope_BHSN, q_pe_BHSR, context_BLW, new_BSW, w_uk_HNC, w_uv_HCV,
    positions_BS; scale) → o_BHSV,  W = C + R, T = L + S

score = ((W_UKᵀ q_nope)·c + q_pe·k_pe)·scale, o = W_UV Σ softmax(score)·c (DeepSeek-V2 §2.1.2),
where c and k_pe are the two parts of a row. `scale` is always explicit: head size^−½ times YaRN's
mscale².

What a token sees follows from the positions: as many rows of its context as stand before the
sequence's first new token, and of the new rows those up to its own.

The form is the one that TensorRT copies nothing for, at any context length:
- context is only read; scores over it and over the step's own rows are taken apart and joined, so
  the cache is never rewritten, sliced or transposed;
- scores are keys-major, [B, T, H, S], with the softmax over axis 1;
- the mix multiplies all W columns and slices the result to C;
- heads are the batch of the W_UK and W_UV products.

And it halves the scratch of a prefill: the queries go in BLOCKS blocks of ⌊(S + i) / BLOCKS⌋
tokens, whose greatest size the builder can tell from that of S, one after the other. For that,
block i + 1 multiplies with a scale that waits for a value of block i: to the scale is added
min(|value|, 0), which is 0. Of a single token all blocks but the last are empty; more than two of
them would take less scratch still (README, "Rules"), for more that is launched in vain in every
decode step.

The softmax is written out: ONNX Runtime's own transposes the scores for any axis but the last, at
128 × 4,096 keys for longer than all the rest of the attention takes; TensorRT treats both alike.

Without a context its part of the mix is selected to be 0: ONNX Runtime fuses the product with the
transpose before it, and the fused operator leaves its result unset where it sums over no rows.
"""

from typing import TYPE_CHECKING

from graphs.ops import MASKED, CustomOp, Output, function_text

if TYPE_CHECKING:
    from torch import Tensor

BLOCKS = 2


def reference(
    q_nope_BHSN: "Tensor",
    q_pe_BHSR: "Tensor",
    context_BLW: "Tensor",
    new_BSW: "Tensor",
    w_uk_HNC: "Tensor",
    w_uv_HCV: "Tensor",
    positions_BS: "Tensor",
    *,
    scale: float,
) -> "Tensor":
    import torch

    L, S, C = context_BLW.shape[1], new_BSW.shape[1], w_uk_HNC.shape[2]
    token = torch.arange(S)
    cached_BLS = (torch.arange(L) < positions_BS[:, :1])[..., None].expand(-1, -1, S)
    own_BSS = (token[:, None] <= token).expand(len(positions_BS), -1, -1)
    hidden_BTS = ~torch.cat([cached_BLS, own_BSS], dim=1)
    rows_BTW = torch.cat([context_BLW, new_BSW], dim=1)
    q_latent_BHSC = torch.einsum("bhsn,hnc->bhsc", q_nope_BHSN, w_uk_HNC)
    query_BHSW = torch.cat([q_latent_BHSC, q_pe_BHSR], dim=-1) * scale
    scores_BTHS = torch.einsum("btw,bhsw->bths", rows_BTW, query_BHSW)
    scores_BTHS = scores_BTHS.masked_fill(hidden_BTS[:, :, None], MASKED)
    weights_BTHS = scores_BTHS.to(torch.float32).softmax(dim=1).to(q_nope_BHSN.dtype)
    mix_BHSC = torch.einsum("bths,btw->bhsw", weights_BTHS, rows_BTW)[..., :C]
    return torch.einsum("bhsc,hcv->bhsv", mix_BHSC, w_uv_HCV)


def outputs(
    q_nope: "Tensor",
    q_pe: "Tensor",
    context: "Tensor",
    new: "Tensor",
    w_uk: "Tensor",
    w_uv: "Tensor",
    positions: "Tensor",
    *,
    scale: float,
) -> list[Output]:
    return [((*q_nope.shape[:3], w_uv.shape[2]), q_nope.dtype)]


_QUERIES = """
        zero = Constant<value_ints = [0]>()
        axis1 = Constant<value_ints = [1]>()
        axis2 = Constant<value_ints = [2]>()
        rest = Constant<value_ints = [-1]>()
        nothing_f = Constant<value_float = 0.0>()
        nothing = CastLike(nothing_f, q_nope)
        scale_f = Constant<value_float: float = @scale>()
        scale_0 = CastLike(scale_f, q_nope)
        B = Shape<start = 0, end = 1>(q_nope)
        H = Shape<start = 1, end = 2>(q_nope)
        S = Shape<start = 2, end = 3>(q_nope)
        N = Shape<start = 3, end = 4>(q_nope)
        C = Shape<start = 1, end = 2>(w_uv)
        V = Shape<start = 2, end = 3>(w_uv)
        W = Shape<start = 2, end = 3>(new)
        L = Shape<start = 1, end = 2>(context)
        T = Add(L, S)
        no_context = Equal(L, zero)
        shape_HMN = Concat<axis = 0>(H, rest, N)
        shape_HBSC = Concat<axis = 0>(H, B, S, C)

        q_HBSN = Transpose<perm = [1, 0, 2, 3]>(q_nope)
        q_HMN = Reshape(q_HBSN, shape_HMN)
        q_HMC = MatMul(q_HMN, w_uk)
        q_HBSC = Reshape(q_HMC, shape_HBSC)
        q_BHSC = Transpose<perm = [1, 0, 2, 3]>(q_HBSC)
        query_BHSW = Concat<axis = -1>(q_BHSC, q_pe)
"""

_VISIBLE = f"""
        hidden_f = Constant<value_float = {MASKED}>()
        hidden = CastLike(hidden_f, q_nope)
        first = Constant<value_int = 0>()
        step = Constant<value_int = 1>()
        to_1L1 = Constant<value_ints = [0, 2]>()
        to_1S11 = Constant<value_ints = [0, 2, 3]>()
        to_111S = Constant<value_ints = [0, 1, 2]>()
        context_rows = Squeeze(L)
        new_rows = Squeeze(S)
        rows_L = Range(first, context_rows, step)
        rows_S = Range(first, new_rows, step)
        rows_1L1 = Unsqueeze(rows_L, to_1L1)
        own_1S11 = Unsqueeze(rows_S, to_1S11)
        tokens_111S = Unsqueeze(rows_S, to_111S)
        length_B1 = Slice(positions, zero, axis1, axis1)
        length_B11 = Unsqueeze(length_B1, axis2)
        cached_BL1 = Less(rows_1L1, length_B11)
        causal_1S1S = LessOrEqual(own_1S11, tokens_111S)
"""

_SHARE = """
        number_{i} = Constant<value_ints = [{i}]>()
        more_{i} = Add(S, number_{i})
        S_{i} = Div(more_{i}, blocks)
        start_{after} = Add(start_{i}, S_{i})
        query_BHsW_{i} = Slice(query_BHSW, start_{i}, start_{after}, axis2)
        causal_1S1s_{i} = Slice(causal_1S1S, start_{i}, start_{after}, axis3)
"""

_WAIT = """
        corner = Constant<value_ints = [0, 0, 0]>()
        opposite = Constant<value_ints = [1, 1, 1]>()
        axes123 = Constant<value_ints = [1, 2, 3]>()
"""

_AFTER = """
        some_{i} = Slice(mix_{before}, corner, opposite, axes123)
        value_{i} = ReduceSum<keepdims = 0>(some_{i})
        size_{i} = Abs(value_{i})
        late_{i} = Min(size_{i}, nothing)
        scale_{i} = Add(scale_0, late_{i})
"""

# s stands for a block's share of S, m for H·s
_BLOCK = """
        m_{i} = Mul(H, S_{i})
        shape_BmW_{i} = Concat<axis = 0>(B, m_{i}, W)
        shape_BSHs_{i} = Concat<axis = 0>(B, S, H, S_{i})
        shape_BSm_{i} = Concat<axis = 0>(B, S, m_{i})
        shape_BTHs_{i} = Concat<axis = 0>(B, T, H, S_{i})
        shape_BTm_{i} = Concat<axis = 0>(B, T, m_{i})
        shape_BHsC_{i} = Concat<axis = 0>(B, H, S_{i}, C)

        scaled_BHsW_{i} = Mul(query_BHsW_{i}, scale_{i})
        query_BmW_{i} = Reshape<allowzero = 1>(scaled_BHsW_{i}, shape_BmW_{i})
        query_BWm_{i} = Transpose<perm = [0, 2, 1]>(query_BmW_{i})
        plain_BLm_{i} = MatMul(context, query_BWm_{i})
        plain_BSm_{i} = MatMul(new, query_BWm_{i})
        scores_BLm_{i} = Where(cached_BL1, plain_BLm_{i}, hidden)
        plain_BSHs_{i} = Reshape<allowzero = 1>(plain_BSm_{i}, shape_BSHs_{i})
        scores_BSHs_{i} = Where(causal_1S1s_{i}, plain_BSHs_{i}, hidden)
        scores_BSm_{i} = Reshape<allowzero = 1>(scores_BSHs_{i}, shape_BSm_{i})
        scores_BTm_{i} = Concat<axis = 1>(scores_BLm_{i}, scores_BSm_{i})
        scores_BTHs_{i} = Reshape<allowzero = 1>(scores_BTm_{i}, shape_BTHs_{i})
        wide_BTHs_{i} = Cast<to = 1>(scores_BTHs_{i})
        peak_B1Hs_{i} = ReduceMax<keepdims = 1>(wide_BTHs_{i}, axis1)
        below_BTHs_{i} = Sub(wide_BTHs_{i}, peak_B1Hs_{i})
        raised_BTHs_{i} = Exp(below_BTHs_{i})
        total_B1Hs_{i} = ReduceSum<keepdims = 1>(raised_BTHs_{i}, axis1)
        soft_BTHs_{i} = Div(raised_BTHs_{i}, total_B1Hs_{i})
        weights_BTHs_{i} = CastLike(soft_BTHs_{i}, q_nope)
        weights_BTm_{i} = Reshape<allowzero = 1>(weights_BTHs_{i}, shape_BTm_{i})
        weights_BLm_{i} = Slice(weights_BTm_{i}, zero, L, axis1)
        weights_BSm_{i} = Slice(weights_BTm_{i}, L, T, axis1)
        weights_BmL_{i} = Transpose<perm = [0, 2, 1]>(weights_BLm_{i})
        weights_BmS_{i} = Transpose<perm = [0, 2, 1]>(weights_BSm_{i})
        product_{i} = MatMul(weights_BmL_{i}, context)
        cached_{i} = Where(no_context, nothing, product_{i})
        own_{i} = MatMul(weights_BmS_{i}, new)
        mix_BmW_{i} = Add(cached_{i}, own_{i})
        mix_BmC_{i} = Slice(mix_BmW_{i}, zero, C, axis2)
        mix_{i} = Reshape<allowzero = 1>(mix_BmC_{i}, shape_BHsC_{i})
"""

_OUTPUT = """
        shape_HMC = Concat<axis = 0>(H, rest, C)
        shape_HBSV = Concat<axis = 0>(H, B, S, V)
        mix_HBSC = Transpose<perm = [1, 0, 2, 3]>(mix_BHSC)
        mix_HMC = Reshape(mix_HBSC, shape_HMC)
        o_HMV = MatMul(mix_HMC, w_uv)
        o_HBSV = Reshape(o_HMV, shape_HBSV)
        o = Transpose<perm = [1, 0, 2, 3]>(o_HBSV)
"""


def in_blocks(name: str) -> tuple[str, ...]:
    """The names of one value in every block."""
    return tuple(f"{name}_{i}" for i in range(BLOCKS))


def body(inputs: int, *, scale: float) -> str:
    blocks = f"""
        blocks = Constant<value_ints = [{BLOCKS}]>()
        axis3 = Constant<value_ints = [3]>()
        start_0 = Identity(zero)
    """
    blocks += "".join(_SHARE.format(i=i, after=i + 1) for i in range(BLOCKS)) + _WAIT
    for i in range(BLOCKS):
        blocks += (_AFTER.format(i=i, before=i - 1) if i else "") + _BLOCK.format(i=i)
    join = f"mix_BHSC = Concat<axis = 2>({', '.join(in_blocks('mix'))})\n"
    return function_text(
        "LatentAttention",
        "q_nope, q_pe, context, new, w_uk, w_uv, positions",
        "o",
        _QUERIES + _VISIBLE + blocks + join + _OUTPUT,
        attributes="scale",
    )


latent_attention = CustomOp("LatentAttention", reference, outputs, body)
