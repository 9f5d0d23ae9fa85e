"""Multi-head latent attention as the checkpoint states it: the readable reference.

Queries go through a low-rank path, or, where `q_lora_rank` is null, are projected directly; keys
and values come from one normed latent of `kv_lora_rank` values and one rotated key of
`qk_rope_head_dim` values that all heads share. The cache chooses one of three ways to attend, equal
but for rounding:

- expanded: latent rows are cached, and each step makes K and V of every head from all of them;
- absorbed: latent rows are cached, and W_UK and W_UV move to the query and output side, so that
  every head attends over the latent itself (DeepSeek-V2 §2.1.2), as in the engines;
- per head: K and V of every head are cached, as in the published model code.

Parameters carry the checkpoint's names. Dimension letters: see graphs/contract/spec.py.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from graphs.contract.config import LATENT_NORM_EPS, ModelConfig

Taps = dict[str, Tensor]


def tap(taps: Taps | None, name: str, value: Tensor) -> Tensor:
    """Record a named intermediate, if taps are recorded; returns it unchanged."""
    if taps is not None:
        taps[name] = value
    return value


class RMSNorm(nn.Module):
    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalised in fp32 (fp64 where the input is), cast to its dtype, then weighted."""
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        normed: Tensor = self.weight * wide.to(x.dtype)
        return normed


def rotate_interleaved(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate pairs (x0,x1), (x2,x3), …; returns half layout: all evens, then all odds."""
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.cat([even * cos - odd * sin, odd * cos + even * sin], dim=-1)


@dataclass
class LatentRows:
    """One layer's cache: the normed latent [B,T,C] and the rotated shared key [B,T,R]."""

    latent_BTC: Tensor
    k_pe_BTR: Tensor
    form: Literal["expanded", "absorbed"] = "expanded"

    @classmethod
    def empty(
        cls,
        config: ModelConfig,
        batch: int,
        dtype: torch.dtype,
        form: Literal["expanded", "absorbed"] = "expanded",
    ) -> "LatentRows":
        return cls(
            torch.empty(batch, 0, config.kv_lora_rank, dtype=dtype),
            torch.empty(batch, 0, config.qk_rope_head_dim, dtype=dtype),
            form,
        )

    @property
    def length(self) -> int:
        return self.latent_BTC.shape[1]

    def append(self, latent_BSC: Tensor, k_pe_BSR: Tensor) -> None:
        self.latent_BTC = torch.cat([self.latent_BTC, latent_BSC], dim=1)
        self.k_pe_BTR = torch.cat([self.k_pe_BTR, k_pe_BSR], dim=1)

    def rows(self) -> Tensor:
        """[B, T, C+R], the layout of the runtime's cache."""
        return torch.cat([self.latent_BTC, self.k_pe_BTR], dim=-1)


@dataclass
class PerHeadRows:
    """One layer's cache as the published code keeps it: K [B,H,T,N+R] and V [B,H,T,V]."""

    keys: Tensor
    values: Tensor

    @classmethod
    def empty(cls, config: ModelConfig, batch: int, dtype: torch.dtype) -> "PerHeadRows":
        heads = config.num_attention_heads
        return cls(
            torch.empty(batch, heads, 0, config.qk_head_dim, dtype=dtype),
            torch.empty(batch, heads, 0, config.v_head_dim, dtype=dtype),
        )

    @property
    def length(self) -> int:
        return self.keys.shape[2]

    def append(self, keys: Tensor, values: Tensor) -> None:
        self.keys = torch.cat([self.keys, keys], dim=2)
        self.values = torch.cat([self.values, values], dim=2)


LayerCache = LatentRows | PerHeadRows


def causal_mask(new: int, cached: int, dtype: torch.dtype) -> Tensor:
    """[1, 1, new, cached+new], added to the scores: query i sees keys 0 … cached+i."""
    keys = torch.arange(cached + new)
    hidden = keys[None, :] > cached + torch.arange(new)[:, None]
    return hidden.to(dtype).mul(torch.finfo(dtype).min)[None, None]


class Attention(nn.Module):
    """`model.layers.N.self_attn`."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        H, C = config.num_attention_heads, config.kv_lora_rank
        N, R, V = config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim
        if config.q_lora_rank is None:
            self.q_proj = nn.Linear(config.hidden_size, H * (N + R), bias=False)
        else:
            self.q_a_proj = nn.Linear(config.hidden_size, config.q_lora_rank, bias=False)
            self.q_a_layernorm = RMSNorm(config.q_lora_rank, LATENT_NORM_EPS)
            self.q_b_proj = nn.Linear(config.q_lora_rank, H * (N + R), bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(config.hidden_size, C + R, bias=False)
        self.kv_a_layernorm = RMSNorm(C, LATENT_NORM_EPS)
        self.kv_b_proj = nn.Linear(C, H * (N + V), bias=False)
        self.o_proj = nn.Linear(H * V, config.hidden_size, bias=False)

    def forward(
        self,
        x_BSD: Tensor,
        cos_BSr: Tensor,
        sin_BSr: Tensor,
        mask: Tensor,
        cache: LayerCache,
        taps: Taps | None = None,
    ) -> Tensor:
        """Attend over the cache and x, and append x's rows to the cache; returns [B,S,D].

        cos and sin belong to the tokens' positions, in x's dtype; mask is added to the scores
        [B,H,S,T].
        """
        q_nope, q_pe = self._queries(x_BSD, cos_BSr, sin_BSr, taps)
        latent, k_pe = self._latent(x_BSD, cos_BSr, sin_BSr, taps)
        if isinstance(cache, PerHeadRows):
            cache.append(*self._expand(latent, k_pe, taps))
            mix = self._attend(q_nope, q_pe, cache.keys, cache.values, mask, taps)
        else:
            cache.append(latent, k_pe)
            if cache.form == "expanded":
                keys, values = self._expand(cache.latent_BTC, cache.k_pe_BTR, taps)
                mix = self._attend(q_nope, q_pe, keys, values, mask, taps)
            else:
                mix = self._attend_absorbed(q_nope, q_pe, cache, mask, taps)
        joined = mix.transpose(1, 2).reshape(*x_BSD.shape[:2], -1)
        return tap(taps, "delta_attn", self.o_proj(joined))

    def _queries(
        self, x_BSD: Tensor, cos: Tensor, sin: Tensor, taps: Taps | None
    ) -> tuple[Tensor, Tensor]:
        c = self.config
        if c.q_lora_rank is None:
            q = self.q_proj(x_BSD)
        else:
            c_q = tap(taps, "c_q", self.q_a_proj(x_BSD))
            q = self.q_b_proj(tap(taps, "c_q_normed", self.q_a_layernorm(c_q)))
        q = q.view(*x_BSD.shape[:2], -1, c.qk_head_dim).transpose(1, 2)
        q_nope, q_pe = q.split([c.qk_nope_head_dim, c.qk_rope_head_dim], dim=-1)
        tap(taps, "q_nope", q_nope)
        tap(taps, "q_pe", q_pe)
        rotated = rotate_interleaved(q_pe, cos[:, None], sin[:, None])
        return q_nope, tap(taps, "q_pe_rotated", rotated)

    def _latent(
        self, x_BSD: Tensor, cos: Tensor, sin: Tensor, taps: Taps | None
    ) -> tuple[Tensor, Tensor]:
        c = self.config
        c_kv, k_pe = self.kv_a_proj_with_mqa(x_BSD).split(
            [c.kv_lora_rank, c.qk_rope_head_dim], dim=-1
        )
        tap(taps, "c_kv", c_kv)
        tap(taps, "k_pe", k_pe)
        latent = tap(taps, "c_kv_normed", self.kv_a_layernorm(c_kv))
        return latent, tap(taps, "k_pe_rotated", rotate_interleaved(k_pe, cos, sin))

    def _expand(
        self, latent_BTC: Tensor, k_pe_BTR: Tensor, taps: Taps | None
    ) -> tuple[Tensor, Tensor]:
        """K [B,H,T,N+R] and V [B,H,T,V] of latent rows."""
        c = self.config
        kv = self.kv_b_proj(latent_BTC)
        kv = kv.view(*latent_BTC.shape[:2], -1, c.qk_nope_head_dim + c.v_head_dim).transpose(1, 2)
        k_nope, values = kv.split([c.qk_nope_head_dim, c.v_head_dim], dim=-1)
        tap(taps, "k_nope", k_nope)
        shared = k_pe_BTR[:, None].expand(-1, k_nope.shape[1], -1, -1)
        keys = torch.cat([k_nope, shared], dim=-1)
        return tap(taps, "keys", keys), tap(taps, "values", values)

    def _attend(
        self,
        q_nope: Tensor,
        q_pe: Tensor,
        keys: Tensor,
        values: Tensor,
        mask: Tensor,
        taps: Taps | None,
    ) -> Tensor:
        query = tap(taps, "query", torch.cat([q_nope, q_pe], dim=-1))
        scores_BHST = torch.matmul(query, keys.transpose(2, 3)) * self.config.softmax_scale + mask
        weights = self._softmax(scores_BHST, taps)
        return tap(taps, "mix", torch.matmul(weights, values))

    def _attend_absorbed(
        self, q_nope: Tensor, q_pe: Tensor, cache: LatentRows, mask: Tensor, taps: Taps | None
    ) -> Tensor:
        w_uk_HNC, w_uv_HVC = self.up_projections()
        q_latent = torch.einsum("bhsn,hnc->bhsc", q_nope, w_uk_HNC)
        scores = torch.einsum("bhsc,btc->bhst", q_latent, cache.latent_BTC)
        scores = scores + torch.einsum("bhsr,btr->bhst", q_pe, cache.k_pe_BTR)
        weights = self._softmax(scores * self.config.softmax_scale + mask, taps)
        latent_mix = torch.einsum("bhst,btc->bhsc", weights, cache.latent_BTC)
        return tap(taps, "mix", torch.einsum("bhsc,hvc->bhsv", latent_mix, w_uv_HVC))

    def _softmax(self, scores_BHST: Tensor, taps: Taps | None) -> Tensor:
        tap(taps, "scores", scores_BHST)
        wide = torch.promote_types(scores_BHST.dtype, torch.float32)
        weights = nn.functional.softmax(scores_BHST, dim=-1, dtype=wide).to(scores_BHST.dtype)
        return tap(taps, "probabilities", weights)

    def up_projections(self) -> tuple[Tensor, Tensor]:
        """W_UK [H,N,C] and W_UV [H,V,C]: the two row blocks of each head in kv_b_proj."""
        c = self.config
        per_head = self.kv_b_proj.weight.view(c.num_attention_heads, -1, c.kv_lora_rank)
        return per_head[:, : c.qk_nope_head_dim], per_head[:, c.qk_nope_head_dim :]
