"""The layers of the engines' blocks, in the engines' layout, by precision.

Parameters are only declared: under FakeTensorMode nothing is allocated, at any size.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from graphs.contract.config import ModelConfig
from graphs.contract.spec import Precision
from graphs.ops.fp8_linear import fp8_linear
from graphs.ops.topk_gate import topk_gate


@dataclass(frozen=True)
class LinearForm:
    """The dtype of activations and wide weights, and whether linear layers are FP8."""

    activation: torch.dtype
    fp8: bool

    @classmethod
    def from_precision(cls, precision: Precision) -> "LinearForm":
        return cls(torch.float32 if precision == "fp32" else torch.bfloat16, precision == "fp8")


def parameter(*shape: int, dtype: torch.dtype) -> nn.Parameter:
    return nn.Parameter(torch.empty(*shape, dtype=dtype), requires_grad=False)


class FP8Linear(nn.Module):
    def __init__(self, fan_in: int, fan_out: int) -> None:
        super().__init__()
        self.weight = parameter(fan_out, fan_in, dtype=torch.float8_e4m3fn)
        self.scale = parameter(fan_out, dtype=torch.float32)

    def forward(self, x: Tensor) -> Tensor:
        """x [M,fan_in] → [M,fan_out]."""
        y: Tensor = fp8_linear(x, self.weight, self.scale)
        return y


class WideLinear(nn.Module):
    def __init__(self, fan_in: int, fan_out: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = parameter(fan_out, fan_in, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        """x [M,fan_in] → [M,fan_out]."""
        return nn.functional.linear(x, self.weight)


def linear(fan_in: int, fan_out: int, form: LinearForm) -> nn.Module:
    return FP8Linear(fan_in, fan_out) if form.fp8 else WideLinear(fan_in, fan_out, form.activation)


class RMSNorm(nn.Module):
    """Computes and returns fp32; the caller casts."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = parameter(width, dtype=torch.float32)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.rms_norm(x.float(), (x.shape[-1],), self.weight, self.eps)


class SwiGLU(nn.Module):
    def __init__(self, hidden_size: int, width: int, form: LinearForm) -> None:
        super().__init__()
        self.width = width
        self.gate_up = linear(hidden_size, 2 * width, form)
        self.down = linear(width, hidden_size, form)

    def forward(self, x_MD: Tensor) -> Tensor:
        gate, up = self.gate_up(x_MD).split([self.width, self.width], dim=-1)
        down: Tensor = self.down(nn.functional.silu(gate) * up)
        return down


class Gate(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.weight = parameter(config.n_routed_experts, config.hidden_size, dtype=torch.float32)
        self.bias: nn.Parameter | None = None
        if config.has_gate_bias:
            self.bias = parameter(config.n_routed_experts, dtype=torch.float32)

    def forward(self, h_MD: Tensor) -> tuple[Tensor, Tensor]:
        c = self.config
        experts, weights = topk_gate(
            h_MD,
            self.weight,
            *(() if self.bias is None else (self.bias,)),
            k=c.num_experts_per_tok,
            n_group=c.n_group,
            topk_group=c.topk_group,
            group_score=c.group_score or "max",  # no effect without expert groups
            scoring=c.scoring_func,
            scaling=c.expert_scaling,
            normalise=int(c.norm_topk_prob),
        )
        return experts, weights
