"""The reference's maths in the engines' layout: the modules that become the four graphs.

Differences from `export.reference.block` (each rule is measured in docs/engines.md):
- linear layers read 2-D activations; weights that read the same activation are fused (q_a‖kv_a, or
  q‖kv_a where queries are projected directly, and gate‖up);
- weights are [out, in] as in the checkpoint, read by Gemm(transB=1);
- the latent cache is a read-only input, the step's new rows are an output; W_UK and W_UV act on
  the query and output side (absorbed MLA);
- rope rows are permuted at packing, so RoPE is in half layout;
- the residual stream, norms, softmax, routing and the experts' accumulator are fp32; each branch
  is cast to the activation dtype after its norm;
- routed experts are a separate graph, with the experts' weights as inputs.

Parameters are only declared: under FakeTensorMode nothing is allocated, at any size.
"""

import torch
from torch import Tensor, nn

from export.engine.layers import Gate, LinearForm, RMSNorm, SwiGLU, WideLinear, linear, parameter
from graphs.contract.config import LATENT_NORM_EPS, ModelConfig
from graphs.contract.spec import EXPERT_SLOTS
from graphs.ops.latent_attention import latent_attention
from graphs.ops.rope import rope


class AttentionBranch(nn.Module):
    """Norm, attention and residual addition, shared by the dense and the MoE block."""

    def __init__(self, config: ModelConfig, form: LinearForm) -> None:
        super().__init__()
        self.config, self.form = config, form
        D, Q, C = config.hidden_size, config.q_lora_rank, config.kv_lora_rank
        H, N, R = config.num_attention_heads, config.qk_nope_head_dim, config.qk_rope_head_dim
        V = config.v_head_dim
        self.input_norm = RMSNorm(D, config.rms_norm_eps)
        if Q is None:
            self.qkv: nn.Module = linear(D, H * (N + R) + C + R, form)
        else:
            self.qkv_a = linear(D, Q + C + R, form)
            self.q_norm = RMSNorm(Q, LATENT_NORM_EPS)
            self.q_b = linear(Q, H * (N + R), form)
        self.kv_norm = RMSNorm(C, LATENT_NORM_EPS)
        self.w_uk = parameter(H, N, C, dtype=form.activation)
        self.w_uv = parameter(H, C, V, dtype=form.activation)
        self.o = linear(H * V, D, form)

    def forward(
        self,
        x_MD: Tensor,
        positions_BS: Tensor,
        context: Tensor,
        cos: Tensor,
        sin: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """The residual stream after attention, fp32 [M,D], and the new latent rows [B,S,W]."""
        c, act = self.config, self.form.activation
        B, S = positions_BS.shape
        H, C, R = c.num_attention_heads, c.kv_lora_rank, c.qk_rope_head_dim
        q, c_kv, k_pe = self._project(self.input_norm(x_MD).to(act))
        q = q.view(B, S, H, c.qk_head_dim).transpose(1, 2)
        q_nope, q_pe = torch.split(q, [c.qk_nope_head_dim, R], dim=-1)
        q_pe = rope(q_pe, cos, sin, positions_BS)
        k_pe = rope(k_pe.view(B, 1, S, R), cos, sin, positions_BS).view(B, S, R)
        new = torch.cat([self.kv_norm(c_kv).to(act).view(B, S, C), k_pe], dim=-1)
        mix_BHSV = latent_attention(
            q_nope, q_pe, context, new, self.w_uk, self.w_uv, positions_BS, scale=c.softmax_scale
        )
        delta = self.o(mix_BHSV.transpose(1, 2).reshape(x_MD.shape[0], H * c.v_head_dim))
        return x_MD + delta.float(), new

    def _project(self, x_MD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries of all heads [M,H·(N+R)], the latent before its norm [M,C], its key [M,R]."""
        c = self.config
        C, R = c.kv_lora_rank, c.qk_rope_head_dim
        if c.q_lora_rank is None:
            width = c.num_attention_heads * c.qk_head_dim
            q, c_kv, k_pe = self.qkv(x_MD).split([width, C, R], dim=-1)
            return q, c_kv, k_pe
        c_q, c_kv, k_pe = self.qkv_a(x_MD).split([c.q_lora_rank, C, R], dim=-1)
        return self.q_b(self.q_norm(c_q).to(x_MD.dtype)), c_kv, k_pe


class DenseBlock(nn.Module):
    """Graph `dense`."""

    def __init__(self, config: ModelConfig, form: LinearForm) -> None:
        super().__init__()
        self.form = form
        self.attention = AttentionBranch(config, form)
        self.post_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = SwiGLU(config.hidden_size, config.intermediate_size, form)

    def forward(
        self,
        x: Tensor,
        positions: Tensor,
        context: Tensor,
        cos: Tensor,
        sin: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """x [B,S,D] fp32 → y [B,S,D] fp32, new [B,S,W]."""
        x_MD = x.reshape(-1, x.shape[-1])
        x_mid, new = self.attention(x_MD, positions, context, cos, sin)
        delta = self.mlp(self.post_norm(x_mid).to(self.form.activation))
        return (x_mid + delta.float()).view(x.shape), new


class MoEBlock(nn.Module):
    """Graph `moe`: a MoE block without the routed experts."""

    def __init__(self, config: ModelConfig, form: LinearForm) -> None:
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
        context: Tensor,
        cos: Tensor,
        sin: Tensor,
    ) -> tuple[Tensor, ...]:
        """x [B,S,D] fp32 → acc [M,D] fp32, h [M,D], experts [M,K], expert_weights [M,K] fp32, new.

        acc is the residual stream after attention plus the shared experts' output; the routed
        experts add to it.
        """
        x_MD = x.reshape(-1, x.shape[-1])
        x_mid, new = self.attention(x_MD, positions, context, cos, sin)
        normed = self.post_norm(x_mid)
        experts, weights = self.gate(normed)
        h = normed.to(self.form.activation)
        return x_mid + self.shared(h).float(), h, experts, weights, new


class Experts(nn.Module):
    """Graph `experts`: `EXPERT_SLOTS` experts, each on the rows of h that chose it.

    An expert slot gathers its rows, and adds gate · expert(rows) to the same rows of the
    accumulator. Rows are distinct within a slot, so ScatterND needs no reduction, which TensorRT
    lacks. An unused slot has one row with gate 0, which selects 0 instead of what it computes.
    """

    def __init__(self, config: ModelConfig, form: LinearForm) -> None:
        super().__init__()
        self.slots = nn.ModuleList(
            SwiGLU(config.hidden_size, config.moe_intermediate_size, form)
            for _ in range(EXPERT_SLOTS)
        )

    def forward(self, h: Tensor, acc: Tensor, rows: list[Tensor], gates: list[Tensor]) -> Tensor:
        """h [M,D], acc fp32 [M,D]; per slot rows int64 [n] and gates fp32 [n,1] → acc_out [M,D]."""
        for expert, chosen, gate in zip(self.slots, rows, gates, strict=True):
            weighted = expert(h.index_select(0, chosen)).float() * gate
            update = torch.where(gate == 0, 0.0, weighted)
            acc = torch.index_put(acc, (chosen,), acc.index_select(0, chosen) + update)
        return acc


class Head(nn.Module):
    """Graph `head`: final norm and lm_head, which stays in 16 bits at fp8."""

    def __init__(self, config: ModelConfig, form: LinearForm) -> None:
        super().__init__()
        self.form = form
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = WideLinear(config.hidden_size, config.vocab_size, form.activation)

    def forward(self, hidden: Tensor) -> Tensor:
        """hidden [M,D] fp32 → logits [M,vocab] fp32."""
        logits: Tensor = self.lm_head(self.norm(hidden).to(self.form.activation))
        return logits.float()
