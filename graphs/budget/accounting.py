"""A model's sizes from its config alone: parameters, bytes stored and packed, cache values.

Every figure is a sum over `Part`s, the tensors of a checkpoint, so that parameters, scale grids and
packed bytes cannot disagree about what there is. Bytes are of the tensors: headers and alignment
are not counted.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

from graphs.contract.config import BlockType, ModelConfig
from graphs.contract.quantization import FP8Blocks, Int4Groups
from graphs.contract.spec import PRECISIONS, Precision

# linear: FP8 in both FP8 forms. expert: a routed expert's, which an INT4 checkpoint has in 4 bits.
# absorbed: W_UK and W_UV, FP8 in the checkpoint, 16 bits packed. vocabulary: embedding and lm_head,
# never FP8. norm, router, bias: fp32 packed.
ComponentKind = Literal["linear", "expert", "absorbed", "vocabulary", "norm", "router", "bias"]


@dataclass(frozen=True)
class Part:
    """Tensors of one shape. `first_row` is above 0 where a checkpoint stores it below another."""

    kind: ComponentKind
    out: int
    fan_in: int = 1
    count: int = 1
    first_row: int = 0

    @property
    def parameters(self) -> int:
        return self.count * self.out * self.fan_in

    @property
    def bf16_bytes(self) -> int:
        """Bytes in a bf16 checkpoint, whose router bias is fp32."""
        return self.parameters * (4 if self.kind == "bias" else 2)

    def fp8_bytes(self, block: tuple[int, int]) -> int:
        """Bytes in a block-FP8 checkpoint: an fp32 scale a scale block, the last one ragged."""
        if self.kind not in ("linear", "expert", "absorbed"):
            return self.bf16_bytes
        end = self.first_row + self.out
        rows = math.ceil(end / block[0]) - math.ceil(self.first_row / block[0])
        return self.parameters + 4 * self.count * rows * math.ceil(self.fan_in / block[1])

    def int4_bytes(self, group_size: int) -> int:
        """Bytes in an INT4 checkpoint: 8 codes a word, a bf16 scale a weight group, 8 of shape."""
        if self.kind != "expert":
            return self.bf16_bytes
        row = 4 * math.ceil(self.fan_in / 8) + 2 * math.ceil(self.fan_in / group_size)
        return self.count * (self.out * row + 8)

    def packed_bytes(self, precision: Precision) -> int:
        """Bytes in this project's weight files; FP8 with one fp32 scale an output channel."""
        if precision == "fp32" or self.kind in ("norm", "router", "bias"):
            return self.parameters * 4
        if precision == "fp8" and self.kind in ("linear", "expert"):
            return self.parameters + 4 * self.count * self.out
        return self.parameters * 2


@dataclass(frozen=True)
class Figures:
    """A component's sums. Of quantised checkpoints only the config's own kind is there."""

    parameters: int
    bf16_checkpoint_bytes: int
    fp8_checkpoint_bytes: int | None
    int4_checkpoint_bytes: int | None
    packed_bytes: dict[Precision, int]


@dataclass(frozen=True)
class Component:
    """A named share of a block; `attention` where it belongs to the attention's subtotal."""

    name: str
    parts: tuple[Part, ...]
    attention: bool = False


@dataclass(frozen=True)
class Account:
    """The tensors of a model by block type, with the figures that follow."""

    config: ModelConfig
    blocks: dict[BlockType, tuple[Component, ...]]
    ends: tuple[Component, ...]  # what is there once: embedding, final norm, lm_head

    @classmethod
    def from_config(cls, config: ModelConfig) -> "Account":
        types: tuple[BlockType, ...] = ("dense", "moe")
        present = [kind for kind in types if config.count(kind)]
        return cls(config, {kind: _block(config, kind) for kind in present}, _ends(config))

    def figures(self, components: Iterable[Component]) -> Figures:
        parts = [part for component in components for part in component.parts]
        fp8 = int4 = None
        match self.config.quantization:
            case FP8Blocks(block):
                fp8 = sum(part.fp8_bytes(block) for part in parts)
            case Int4Groups(group_size):
                int4 = sum(part.int4_bytes(group_size) for part in parts)
        return Figures(
            sum(part.parameters for part in parts),
            sum(part.bf16_bytes for part in parts),
            fp8,
            int4,
            {p: sum(part.packed_bytes(p) for part in parts) for p in PRECISIONS},
        )

    @property
    def model(self) -> Figures:
        every = [*self.ends]
        for kind, components in self.blocks.items():
            every += components * self.config.count(kind)
        return self.figures(every)

    def active_parameters(self, kind: BlockType) -> int:
        """One block's parameters for one token: all but the experts that it is not routed to."""
        c = self.config
        idle = c.n_routed_experts - c.num_experts_per_tok if kind == "moe" else 0
        expert = sum(part.parameters for part in _swiglu(c.hidden_size, c.moe_intermediate_size))
        return self.figures(self.blocks[kind]).parameters - idle * expert

    @property
    def active_parameters_per_token(self) -> int:
        """Parameters with lm_head and the final norm, without the embedding, a row looked up."""
        blocks = sum(self.active_parameters(kind) * self.config.count(kind) for kind in self.blocks)
        return blocks + self.figures(self.ends[1:]).parameters

    @property
    def cache_values(self) -> dict[str, int]:
        """Values kept per position and layer: the latent, and every head's own key and value."""
        c = self.config
        per_head = c.num_attention_heads * (c.qk_head_dim + c.v_head_dim)
        return {"latent": c.cache_width, "per_head": per_head}

    def as_dict(self) -> dict[str, Any]:
        """Every figure, for `--json`."""
        return {
            "blocks": {kind: self._block_dict(kind) for kind in self.blocks},
            "ends": {c.name: vars(self.figures([c])) for c in self.ends},
            "model": vars(self.model),
            "active_parameters_per_token": self.active_parameters_per_token,
            "cache_values_per_position_and_layer": self.cache_values,
        }

    def _block_dict(self, kind: BlockType) -> dict[str, Any]:
        components, layers = self.blocks[kind], self.config.count(kind)
        return {
            "layers": layers,
            "components": {c.name: vars(self.figures([c])) for c in components},
            "attention": vars(self.figures(c for c in components if c.attention)),
            "block": vars(self.figures(components)),
            "active_parameters": self.active_parameters(kind),
            "parameters_in_all_layers": {
                c.name: self.figures([c]).parameters * layers for c in components
            },
        }


def _block(config: ModelConfig, kind: BlockType) -> tuple[Component, ...]:
    D, E = config.hidden_size, config.n_routed_experts
    norms = Component("block norms", (Part("norm", D, count=2),))
    bias = (Part("bias", E),) if config.has_gate_bias else ()
    if kind == "dense":
        return (
            *_attention(config),
            norms,
            Component("SwiGLU MLP", _swiglu(D, config.intermediate_size)),
        )
    return (
        *_attention(config),
        norms,
        Component("router", (Part("router", E, D), *bias)),
        Component("shared experts", _swiglu(D, config.shared_intermediate_size)),
        Component("routed experts", _swiglu(D, config.moe_intermediate_size, E, "expert")),
    )


def _attention(config: ModelConfig) -> tuple[Component, ...]:
    """kv_a_proj_with_mqa holds C latent rows, then R rope rows; kv_b_proj W_UK and W_UV."""
    D, Q, C = config.hidden_size, config.q_lora_rank, config.kv_lora_rank
    H, N, R = config.num_attention_heads, config.qk_nope_head_dim, config.qk_rope_head_dim
    V = config.v_head_dim
    parts: dict[str, tuple[Part, ...]] = {}
    if Q is not None:
        parts["query compression"] = (Part("linear", Q, D), Part("norm", Q))
    parts |= {
        "query heads": (Part("linear", H * (N + R), D if Q is None else Q),),
        "key–value compression": (Part("linear", C, D), Part("norm", C)),
        "shared rope key": (Part("linear", R, D, first_row=C),),
        "W_UK": (Part("absorbed", H * N, C),),
        "W_UV": (Part("absorbed", H * V, C, first_row=H * N),),
        "output projection": (Part("linear", D, H * V),),
    }
    return tuple(Component(name, tensors, attention=True) for name, tensors in parts.items())


def _swiglu(
    hidden_size: int, width: int, count: int = 1, kind: ComponentKind = "linear"
) -> tuple[Part, ...]:
    return (
        Part(kind, width, hidden_size, 2 * count),
        Part(kind, hidden_size, width, count),
    )


def _ends(config: ModelConfig) -> tuple[Component, ...]:
    D, vocab = config.hidden_size, config.vocab_size
    return (
        Component("embedding", (Part("vocabulary", vocab, D),)),
        Component("final norm", (Part("norm", D),)),
        Component("lm_head", (Part("vocabulary", vocab, D),)),
    )
