"""The reference's maths in the engines' layout: the modules that become the four graphs.

What differs from `export.block`, and why (the measurements behind each rule: README, "Rules"):
- linear layers read 2-D activations; weights that read the same activation are fused (q_a‖kv_a,
  gate‖up);
- FP8 weights are [in, out], 16- and 32-bit ones [out, in] as in the checkpoint, read by
  Gemm(transB=1);
- the latent cache is a read-only input, the step's new rows an output; W_UK and W_UV act on the
  query and output side (absorbed MLA);
- rope rows are permuted at packing, so RoPE is in half layout;
- the residual stream, norms, softmax, routing and the experts' accumulator are fp32; a branch is
  cast to the activation dtype after its norm;
- routed experts are a graph of their own, with the experts' weights as inputs.

Parameters are only declared: under FakeTensorMode nothing is allocated, at any size.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from graphs.config import LATENT_NORM_EPS, ModelConfig
from graphs.ops.fp8_linear import fp8_linear
from graphs.ops.latent_attention import latent_attention
from graphs.ops.rope import rope
from graphs.ops.topk_gate import topk_gate
from graphs.spec import SLOTS, Precision


@dataclass(frozen=True)
class Form:
    """How a precision is carried out: the dtype of activations and of wide weights; FP8 or not."""

    activation: torch.dtype
    fp8: bool

    @classmethod
    def of(cls, precision: Precision) -> "Form":
        return cls(torch.float32 if precision == "fp32" else torch.bfloat16, precision == "fp8")


def parameter(*shape: int, dtype: torch.dtype) -> nn.Parameter:
    return nn.Parameter(torch.empty(*shape, dtype=dtype), requires_grad=False)


class FP8Linear(nn.Module):
    def __init__(self, fan_in: int, fan_out: int) -> None:
        super().__init__()
        self.weight = parameter(fan_in, fan_out, dtype=torch.float8_e4m3fn)
        self.scale = parameter(fan_out, dtype=torch.float32)

    def forward(self, x_MK: Tensor) -> Tensor:
        y: Tensor = fp8_linear(x_MK, self.weight, self.scale)
        return y


class WideLinear(nn.Module):
    def __init__(self, fan_in: int, fan_out: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = parameter(fan_out, fan_in, dtype=dtype)

    def forward(self, x_MK: Tensor) -> Tensor:
        return nn.functional.linear(x_MK, self.weight)


def linear(fan_in: int, fan_out: int, form: Form) -> nn.Module:
    return FP8Linear(fan_in, fan_out) if form.fp8 else WideLinear(fan_in, fan_out, form.activation)


class RMSNorm(nn.Module):
    """In fp32, to fp32: the caller casts."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = parameter(width, dtype=torch.float32)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.rms_norm(x.float(), (x.shape[-1],), self.weight, self.eps)


class SwiGLU(nn.Module):
    def __init__(self, hidden_size: int, width: int, form: Form) -> None:
        super().__init__()
        self.width = width
        self.gate_up = linear(hidden_size, 2 * width, form)
        self.down = linear(width, hidden_size, form)

    def forward(self, x_MD: Tensor) -> Tensor:
        gate, up = self.gate_up(x_MD).split([self.width, self.width], dim=-1)
        down: Tensor = self.down(nn.functional.silu(gate) * up)
        return down


class AttentionBranch(nn.Module):
    """Norm, attention and residual addition, shared by the dense and the MoE block."""

    def __init__(self, config: ModelConfig, form: Form) -> None:
        super().__init__()
        self.config, self.form = config, form
        D, Q, C = config.hidden_size, config.q_lora_rank, config.kv_lora_rank
        H, N, R = config.num_attention_heads, config.qk_nope_head_dim, config.qk_rope_head_dim
        V = config.v_head_dim
        self.input_norm = RMSNorm(D, config.rms_norm_eps)
        self.qkv_a = linear(D, Q + C + R, form)
        self.q_norm = RMSNorm(Q, LATENT_NORM_EPS)
        self.kv_norm = RMSNorm(C, LATENT_NORM_EPS)
        self.q_b = linear(Q, H * (N + R), form)
        self.w_uk = parameter(H, N, C, dtype=form.activation)
        self.w_uv = parameter(H, C, V, dtype=form.activation)
        self.o = linear(H * V, D, form)

    def forward(
        self,
        x_MD: Tensor,
        positions_BS: Tensor,
        mask: Tensor,
        context: Tensor,
        cos: Tensor,
        sin: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """The residual stream after attention, fp32 [M,D], and the new latent rows [B,S,W]."""
        c, act = self.config, self.form.activation
        B, S = positions_BS.shape
        H, C, R = c.num_attention_heads, c.kv_lora_rank, c.qk_rope_head_dim
        qkv = self.qkv_a(self.input_norm(x_MD).to(act))
        c_q, c_kv, k_pe = qkv.split([c.q_lora_rank, C, R], dim=-1)
        q = self.q_b(self.q_norm(c_q).to(act)).view(B, S, H, c.qk_head_dim).transpose(1, 2)
        q_nope, q_pe = q.split([c.qk_nope_head_dim, R], dim=-1)
        q_pe = rope(q_pe, cos, sin, positions_BS)
        k_pe = rope(k_pe.view(B, 1, S, R), cos, sin, positions_BS).view(B, S, R)
        new = torch.cat([self.kv_norm(c_kv).to(act).view(B, S, C), k_pe], dim=-1)
        mix_BHSV = latent_attention(
            q_nope, q_pe, context, new, self.w_uk, self.w_uv, mask, scale=c.softmax_scale
        )
        delta = self.o(mix_BHSV.transpose(1, 2).reshape(x_MD.shape[0], H * c.v_head_dim))
        return x_MD + delta.float(), new


class DenseBlock(nn.Module):
    """Graph `dense`."""

    def __init__(self, config: ModelConfig, form: Form) -> None:
        super().__init__()
        self.form = form
        self.attention = AttentionBranch(config, form)
        self.post_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = SwiGLU(config.hidden_size, config.intermediate_size, form)

    def forward(
        self,
        x: Tensor,
        positions: Tensor,
        mask: Tensor,
        context: Tensor,
        cos: Tensor,
        sin: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """x [B,S,D] fp32 → y [B,S,D] fp32, new [B,S,W]."""
        x_MD = x.reshape(-1, x.shape[-1])
        x_mid, new = self.attention(x_MD, positions, mask, context, cos, sin)
        delta = self.mlp(self.post_norm(x_mid).to(self.form.activation))
        return (x_mid + delta.float()).view(x.shape), new


class MoEBlock(nn.Module):
    """Graph `moe`: all of a MoE block but the routed experts."""

    def __init__(self, config: ModelConfig, form: Form) -> None:
        super().__init__()
        self.config, self.form = config, form
        self.attention = AttentionBranch(config, form)
        self.post_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.gate = Gate(config)
        self.shared = SwiGLU(config.hidden_size, config.shared_intermediate_size, form)

    def forward(
        self,
        x: Tensor,
        positions: Tensor,
        mask: Tensor,
        context: Tensor,
        cos: Tensor,
        sin: Tensor,
    ) -> tuple[Tensor, ...]:
        """x [B,S,D] fp32 → acc [M,D] fp32, h [M,D], experts [M,K], expert_weights [M,K] fp32, new.

        acc is the residual stream after attention plus the shared expert: the accumulator to which
        the routed experts add.
        """
        x_MD = x.reshape(-1, x.shape[-1])
        x_mid, new = self.attention(x_MD, positions, mask, context, cos, sin)
        normed = self.post_norm(x_mid)
        experts, weights = self.gate(normed)
        h = normed.to(self.form.activation)
        return x_mid + self.shared(h).float(), h, experts, weights, new


class Gate(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.weight = parameter(config.n_routed_experts, config.hidden_size, dtype=torch.float32)
        self.bias = parameter(config.n_routed_experts, dtype=torch.float32)

    def forward(self, h_MD: Tensor) -> tuple[Tensor, Tensor]:
        c = self.config
        experts, weights = topk_gate(
            h_MD,
            self.weight,
            self.bias,
            k=c.num_experts_per_tok,
            n_group=c.n_group,
            topk_group=c.topk_group,
            group_score="top2_sum",
            scoring="sigmoid",
            scaling=c.routed_scaling_factor,
            normalise=int(c.norm_topk_prob),
        )
        return experts, weights


class Experts(nn.Module):
    """Graph `experts`: `SLOTS` experts, each on the rows of h that chose it.

    A slot gathers its rows, and adds gate · expert(rows) to the same rows of the accumulator. Rows
    are distinct within a slot, so ScatterND needs no reduction, which TensorRT lacks. An unused
    slot has one row with gate 0, and a gate of 0 selects 0, so nothing it computes can reach the
    result.
    """

    def __init__(self, config: ModelConfig, form: Form) -> None:
        super().__init__()
        self.slots = nn.ModuleList(
            SwiGLU(config.hidden_size, config.moe_intermediate_size, form) for _ in range(SLOTS)
        )

    def forward(self, h: Tensor, acc: Tensor, rows: list[Tensor], gates: list[Tensor]) -> Tensor:
        """h [M,D], acc fp32 [M,D]; per slot rows int64 [R], gate fp32 [R,1] → acc_out [M,D]."""
        for expert, rows_R, gate_R1 in zip(self.slots, rows, gates, strict=True):
            weighted = expert(h.index_select(0, rows_R)).float() * gate_R1
            update = torch.where(gate_R1 == 0, 0.0, weighted)
            acc = torch.index_put(acc, (rows_R,), acc.index_select(0, rows_R) + update)
        return acc


class Head(nn.Module):
    """Graph `head`: final norm and lm_head, which stays in 16 bits at fp8."""

    def __init__(self, config: ModelConfig, form: Form) -> None:
        super().__init__()
        self.form = form
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = WideLinear(config.hidden_size, config.vocab_size, form.activation)

    def forward(self, hidden: Tensor) -> Tensor:
        """hidden [M,D] fp32 → logits [M,vocab] fp32."""
        logits: Tensor = self.lm_head(self.norm(hidden).to(self.form.activation))
        return logits.float()
