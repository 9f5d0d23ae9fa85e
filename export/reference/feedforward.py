"""SwiGLU, the gate and the mixture of experts: the readable reference."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from export.reference.attention import Taps, tap
from graphs.contract.config import ModelConfig


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
    """`mlp.gate`: routing by the config's `topk_method`, in fp32 whatever the input's dtype.

    Scores are the sigmoid (DeepSeek-V3 §2.1.2) or the softmax (DeepSeek-V2) of the logits. The
    correction bias, where there is one, is added to the scores to choose experts, and not to weigh
    them. With several expert groups, experts are chosen from the best `topk_group` of them; a group
    is rated by the sum of its two best scores, or by its best one (`group_score`).
    """

    e_score_correction_bias: Tensor | None

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(torch.zeros(config.n_routed_experts, config.hidden_size))
        bias = torch.zeros(config.n_routed_experts) if config.has_gate_bias else None
        self.register_buffer("e_score_correction_bias", bias)

    def forward(self, h_MD: Tensor, taps: Taps | None = None) -> tuple[Tensor, Tensor]:
        """Experts [M,K] int64 in no particular order, and their weights [M,K] fp32."""
        c = self.config
        wide = torch.promote_types(h_MD.dtype, torch.float32)
        logits = tap(taps, "gate_logits", F.linear(h_MD.to(wide), self.weight.to(wide)))
        scores = logits.sigmoid() if c.scoring_func == "sigmoid" else logits.softmax(-1)
        choice = tap(taps, "gate_scores", scores)
        if self.e_score_correction_bias is not None:
            choice = choice + self.e_score_correction_bias
        if c.n_group > 1:
            grouped = choice.view(len(choice), c.n_group, -1)
            rated = 2 if c.group_score == "top2_sum" else 1
            group_scores = grouped.topk(rated, dim=-1).values.sum(-1)
            kept = group_scores.topk(c.topk_group, dim=-1).indices
            hidden = torch.ones_like(group_scores, dtype=torch.bool).scatter(-1, kept, False)
            choice = grouped.masked_fill(hidden[..., None], -torch.inf).flatten(-2)
        experts = choice.topk(c.num_experts_per_tok, dim=-1).indices
        weights = scores.gather(-1, experts)
        if c.norm_topk_prob:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        weights = weights * c.expert_scaling
        return tap(taps, "experts", experts), tap(taps, "expert_weights", weights)


class MoE(nn.Module):
    """`mlp` of a MoE block: routed experts, added in ascending order, and the shared experts."""

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
            rows, choices = torch.where(experts_MK == index)
            output = self.experts[index](h_MD[rows]) * weights_MK[rows, choices, None]
            routed = routed.index_add(0, rows, output.to(routed.dtype))
        tap(taps, "routed", routed)
        shared_taps: Taps = {}
        shared = tap(taps, "shared", self.shared_experts(h_BSD, shared_taps))
        for name in ("gate", "up", "product"):
            tap(taps, f"shared_{name}", shared_taps[name])
        return routed.to(h_BSD.dtype).view_as(h_BSD) + shared
