"""The two block types and the whole model around them: the readable reference.

`ReferenceModel.state_dict()` has the checkpoint's tensor names and shapes.
"""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from export.reference.attention import (
    Attention,
    LatentRows,
    LayerCache,
    RMSNorm,
    Taps,
    causal_mask,
    tap,
)
from export.reference.feedforward import MoE, SwiGLU
from export.reference.rope import rope_tables
from graphs.contract.config import ModelConfig


class Block(nn.Module):
    """`model.layers.N`: attention, then SwiGLU or MoE, each added to the residual stream."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        dense = config.block_type(layer) == "dense"
        self.self_attn = Attention(config)
        self.mlp = SwiGLU(config.hidden_size, config.intermediate_size) if dense else MoE(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(
        self,
        x_BSD: Tensor,
        cos_BSr: Tensor,
        sin_BSr: Tensor,
        mask: Tensor,
        cache: LayerCache,
        taps: Taps | None = None,
    ) -> Tensor:
        x_attn = tap(taps, "x_attn", self.input_layernorm(x_BSD))
        delta = self.self_attn(x_attn, cos_BSr, sin_BSr, mask, cache, taps)
        x_mid = tap(taps, "x_mid", x_BSD + delta)
        h = tap(taps, "h", self.post_attention_layernorm(x_mid))
        return tap(taps, "y", x_mid + tap(taps, "delta_mlp", self.mlp(h, taps)))


class Trunk(nn.Module):
    """`model`: token embedding, blocks, final norm."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Block(config, i) for i in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)


class ReferenceModel(nn.Module):
    """Token ids to logits, with any cache of `export.reference.attention`."""

    cos: Tensor
    sin: Tensor

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.model = Trunk(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        cos, sin = rope_tables(config)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def block(self, layer: int) -> Block:
        block = self.model.layers[layer]
        assert isinstance(block, Block)
        return block

    def empty_caches(
        self, batch: int, form: Literal["expanded", "absorbed"] = "expanded"
    ) -> list[LayerCache]:
        dtype = self.model.norm.weight.dtype
        layers = range(self.config.num_hidden_layers)
        return [LatentRows.empty(self.config, batch, dtype, form) for _ in layers]

    def forward(
        self,
        ids_BS: Tensor,
        caches: Sequence[LayerCache] | None = None,
        taps: Sequence[Taps] | None = None,
    ) -> Tensor:
        """Logits [B,S,vocab] of tokens that follow the caches' rows; all caches have one length.

        `taps`, one dict per layer, receives each block's input `x` and named intermediates.
        """
        batch, new = ids_BS.shape
        caches = self.empty_caches(batch) if caches is None else caches
        cached = caches[0].length
        x = self.model.embed_tokens(ids_BS)
        cos, sin = self.tables(torch.arange(cached, cached + new).expand(batch, new), x.dtype)
        mask = causal_mask(new, cached, x.dtype)
        for index, (layer, cache) in enumerate(zip(self.model.layers, caches, strict=True)):
            layer_taps = taps[index] if taps is not None else None
            tap(layer_taps, "x", x)
            x = layer(x, cos, sin, mask, cache, layer_taps)
        logits: Tensor = self.lm_head(self.model.norm(x))
        return logits

    def tables(self, positions_BS: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """cos and sin [B,S,R/2] of these positions, computed in fp32, then cast."""
        return self.cos[positions_BS].to(dtype), self.sin[positions_BS].to(dtype)
