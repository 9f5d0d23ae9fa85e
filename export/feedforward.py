"""SwiGLU, and the mixture of experts with its bias-corrected gate: the readable reference."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from export.attention import Taps, tap
from graphs.config import ModelConfig


class SwiGLU(nn.Module):
    """A dense block's `mlp`, a routed expert, or the shared experts: down(silu(gate x) · up x)."""

    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)

    def forward(self, x: Tensor, taps: Taps | None = None) -> Tensor:
        gate = tap(taps, "gate", self.gate_proj(x))
        up = tap(taps, "up", self.up_proj(x))
        activated = tap(taps, "activated", F.silu(gate))
        product = tap(taps, "product", activated * up)
        down: Tensor = self.down_proj(product)
        return down


class Gate(nn.Module):
    """`mlp.gate`: noaux_tc routing (DeepSeek-V3 §2.1.2), in fp32 whatever the input's dtype.

    The correction bias takes part in choosing experts; their weights are the unbiased scores.
    """

    e_score_correction_bias: Tensor

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(torch.zeros(config.n_routed_experts, config.hidden_size))
        self.register_buffer("e_score_correction_bias", torch.zeros(config.n_routed_experts))

    def forward(self, h_MD: Tensor, taps: Taps | None = None) -> tuple[Tensor, Tensor]:
        """Experts [M,K] int64 in no particular order, and their weights [M,K] fp32."""
        c = self.config
        wide = torch.promote_types(h_MD.dtype, torch.float32)
        logits = tap(taps, "gate_logits", F.linear(h_MD.to(wide), self.weight.to(wide)))
        scores = tap(taps, "gate_scores", logits.sigmoid())
        choice = scores + self.e_score_correction_bias
        if c.n_group > 1:
            grouped = choice.view(len(choice), c.n_group, -1)
            group_scores = grouped.topk(min(2, grouped.shape[-1]), dim=-1).values.sum(-1)
            kept = group_scores.topk(c.topk_group, dim=-1).indices
            hidden = torch.ones_like(group_scores, dtype=torch.bool).scatter(-1, kept, False)
            choice = grouped.masked_fill(hidden[..., None], -torch.inf).flatten(-2)
        experts = choice.topk(c.num_experts_per_tok, dim=-1).indices
        weights = scores.gather(-1, experts)
        if c.norm_topk_prob:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        weights = weights * c.routed_scaling_factor
        return tap(taps, "experts", experts), tap(taps, "expert_weights", weights)


class MoE(nn.Module):
    """`mlp` of a MoE block: routed experts, summed in ascending order, and the shared experts."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate = Gate(config)
        self.experts = nn.ModuleList(
            SwiGLU(config.hidden_size, config.moe_intermediate_size)
            for _ in range(config.n_routed_experts)
        )
        self.shared_experts = SwiGLU(config.hidden_size, config.shared_intermediate_size)

    def forward(self, h_BSD: Tensor, taps: Taps | None = None) -> Tensor:
        h_MD = h_BSD.reshape(-1, h_BSD.shape[-1])
        experts_MK, weights_MK = self.gate(h_MD, taps)
        routed = torch.zeros_like(h_MD, dtype=weights_MK.dtype)
        for index in experts_MK.unique().tolist():
            rows, slots = torch.where(experts_MK == index)
            output = self.experts[index](h_MD[rows]) * weights_MK[rows, slots, None]
            routed = routed.index_add(0, rows, output.to(routed.dtype))
        tap(taps, "routed", routed)
        shared = tap(taps, "shared", self.shared_experts(h_BSD))
        return routed.to(h_BSD.dtype).view_as(h_BSD) + shared
