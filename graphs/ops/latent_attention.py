"""LatentAttention: absorbed MLA over cached and new latent rows.

    LatentAttention(q_nope_BHSN, q_pe_BHSR, context_BLW, new_BSW, w_uk_HNC, w_uv_HCV, mask_BT1S;
    scale)
        → o_BHSV,  W = C + R, T = L + S

score = ((W_UKᵀ q_nope)·c + q_pe·k_pe)·scale, o = W_UV Σ softmax(score)·c (DeepSeek-V2 §2.1.2),
where c and k_pe are the two parts of a row. `scale` is always explicit: head size^−½ times YaRN's
mscale².

The form is the one that TensorRT copies nothing for, at any context length:
- context is only read; scores over it and over the step's own rows are taken apart and joined, so
  the cache is never rewritten, sliced or transposed;
- scores are keys-major, [B, T, H, S], with the softmax over axis 1;
- the mix multiplies all W columns and slices the result to C;
- heads are the batch of the W_UK and W_UV products.

Without a context its part of the mix is selected to be 0: ONNX Runtime fuses the product with the
transpose before it, and the fused operator leaves its result unset where it sums over no rows.
"""

from typing import TYPE_CHECKING

from graphs.ops import CustomOp, Output, function_text

if TYPE_CHECKING:
    from torch import Tensor


def reference(
    q_nope_BHSN: "Tensor",
    q_pe_BHSR: "Tensor",
    context_BLW: "Tensor",
    new_BSW: "Tensor",
    w_uk_HNC: "Tensor",
    w_uv_HCV: "Tensor",
    mask_BT1S: "Tensor",
    *,
    scale: float,
) -> "Tensor":
    import torch

    C = w_uk_HNC.shape[2]
    rows_BTW = torch.cat([context_BLW, new_BSW], dim=1)
    q_latent_BHSC = torch.einsum("bhsn,hnc->bhsc", q_nope_BHSN, w_uk_HNC)
    query_BHSW = torch.cat([q_latent_BHSC, q_pe_BHSR], dim=-1) * scale
    scores_BTHS = torch.einsum("btw,bhsw->bths", rows_BTW, query_BHSW) + mask_BT1S
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
    mask: "Tensor",
    *,
    scale: float,
) -> list[Output]:
    return [((*q_nope.shape[:3], w_uv.shape[2]), q_nope.dtype)]


def body(inputs: int, *, scale: float) -> str:
    return function_text(
        "LatentAttention",
        "q_nope, q_pe, context, new, w_uk, w_uv, mask",
        "o",
        """
        zero = Constant<value_ints = [0]>()
        axis1 = Constant<value_ints = [1]>()
        axis2 = Constant<value_ints = [2]>()
        rest = Constant<value_ints = [-1]>()
        scale_f = Constant<value_float: float = @scale>()
        scale_c = CastLike(scale_f, q_nope)
        nothing_f = Constant<value_float = 0.0>()
        nothing = CastLike(nothing_f, q_nope)
        B = Shape<start = 0, end = 1>(q_nope)
        H = Shape<start = 1, end = 2>(q_nope)
        S = Shape<start = 2, end = 3>(q_nope)
        N = Shape<start = 3, end = 4>(q_nope)
        C = Shape<start = 1, end = 2>(w_uv)
        V = Shape<start = 2, end = 3>(w_uv)
        W = Shape<start = 2, end = 3>(new)
        L = Shape<start = 1, end = 2>(context)
        T = Shape<start = 1, end = 2>(mask)
        no_context = Equal(L, zero)
        shape_HMN = Concat<axis = 0>(H, rest, N)
        shape_HBSC = Concat<axis = 0>(H, B, S, C)
        shape_BMW = Concat<axis = 0>(B, rest, W)
        shape_BTHS = Concat<axis = 0>(B, T, H, S)
        shape_BTM = Concat<axis = 0>(B, T, rest)
        shape_BHSC = Concat<axis = 0>(B, H, S, C)
        shape_HMC = Concat<axis = 0>(H, rest, C)
        shape_HBSV = Concat<axis = 0>(H, B, S, V)

        q_HBSN = Transpose<perm = [1, 0, 2, 3]>(q_nope)
        q_HMN = Reshape(q_HBSN, shape_HMN)
        q_HMC = MatMul(q_HMN, w_uk)
        q_HBSC = Reshape(q_HMC, shape_HBSC)
        q_BHSC = Transpose<perm = [1, 0, 2, 3]>(q_HBSC)
        query_BHSW = Concat<axis = -1>(q_BHSC, q_pe)
        scaled_BHSW = Mul(query_BHSW, scale_c)
        query_BMW = Reshape(scaled_BHSW, shape_BMW)
        query_BWM = Transpose<perm = [0, 2, 1]>(query_BMW)

        scores_L = MatMul(context, query_BWM)
        scores_S = MatMul(new, query_BWM)
        scores_BTM = Concat<axis = 1>(scores_L, scores_S)
        scores_BTHS = Reshape(scores_BTM, shape_BTHS)
        masked_BTHS = Add(scores_BTHS, mask)
        wide_BTHS = Cast<to = 1>(masked_BTHS)
        soft_BTHS = Softmax<axis = 1>(wide_BTHS)
        weights_BTHS = CastLike(soft_BTHS, q_nope)
        weights_BTM = Reshape(weights_BTHS, shape_BTM)

        weights_L = Slice(weights_BTM, zero, L, axis1)
        weights_S = Slice(weights_BTM, L, T, axis1)
        weights_ML = Transpose<perm = [0, 2, 1]>(weights_L)
        weights_MS = Transpose<perm = [0, 2, 1]>(weights_S)
        product_L = MatMul(weights_ML, context)
        mix_L = Where(no_context, nothing, product_L)
        mix_S = MatMul(weights_MS, new)
        mix_BMW = Add(mix_L, mix_S)
        mix_BMC = Slice(mix_BMW, zero, C, axis2)
        mix_BHSC = Reshape(mix_BMC, shape_BHSC)
        mix_HBSC = Transpose<perm = [1, 0, 2, 3]>(mix_BHSC)
        mix_HMC = Reshape(mix_HBSC, shape_HMC)
        o_HMV = MatMul(mix_HMC, w_uv)
        o_HBSV = Reshape(o_HMV, shape_HBSV)
        o = Transpose<perm = [1, 0, 2, 3]>(o_HBSV)
        """,
        attributes="scale",
    )


latent_attention = CustomOp("LatentAttention", reference, outputs, body)
