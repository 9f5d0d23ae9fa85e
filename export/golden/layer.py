"""Goldens of a model that does not fit in memory: each layer alone, on random inputs.

    golden/dense_<layer>_prefill    128 tokens, nothing cached
    golden/moe_<layer>_prefill      16 tokens, nothing cached
    golden/<block>_<layer>_decode   one token on 1,000 cached rows of a stride of 1,024, as the
                                    runtime's cache lays out a batch: the last rows are masked
    golden/experts_<layer>_prefill_0    one run of the first MoE layer's experts
    golden/head

There is no end-to-end golden, since it would take the whole model. The residual stream has a
standard deviation of 1; cache rows are a normed latent and a rotated key, as the layer makes them.
"""

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from export.checkpoint.open import Checkpoint
from export.golden.block import BlockGolden, GoldenCase, as_stored, write_cases
from export.golden.rounded import rounded_block, rounded_head
from export.packing.pack import matching_spec
from export.reference.attention import rotate_interleaved
from export.reference.rope import rope_tables
from graphs.contract.config import BlockType
from graphs.contract.spec import BuildSpec

PREFILL: dict[BlockType, int] = {"dense": 128, "moe": 16}
CACHED, STRIDE = 1000, 1024
HEAD_ROWS = 16


def write_layer_goldens(checkpoint: Checkpoint, build: Path) -> list[Path]:
    """Compute and write them, one layer in memory at a time. Raises BuildError, CheckpointError."""
    spec = matching_spec(checkpoint, build)
    return write_cases(spec, build, _cases(checkpoint, spec))


def _cases(checkpoint: Checkpoint, spec: BuildSpec) -> Iterator[GoldenCase]:
    config, precision = spec.config, spec.precision
    tables = rope_tables(config)
    for layer in range(config.num_hidden_layers):
        block = rounded_block(checkpoint, layer, precision)
        yield from _layer(BlockGolden(checkpoint, block, layer, precision, *tables))
    hidden = torch.randn(HEAD_ROWS, config.hidden_size, generator=torch.Generator().manual_seed(0))
    logits = rounded_head(checkpoint, precision)(hidden)
    arrays = {"input.hidden": hidden, "output.logits": logits}
    yield GoldenCase("head", {"graph": "head"}, arrays)


def _layer(golden: BlockGolden) -> Iterator[GoldenCase]:
    config, generator = golden.config, torch.Generator().manual_seed(golden.layer)
    tokens = PREFILL[config.block_type(golden.layer)]
    x = torch.randn(1, tokens, config.hidden_size, generator=generator)
    rows = _rows(golden, min(CACHED, config.max_position_embeddings - 1), generator)
    prefill = golden.case("prefill", x, rows[:, :0], [0], stride=0)
    yield prefill
    yield golden.case("decode", x[:, :1], rows, [rows.shape[1]], STRIDE)
    if golden.layer == config.first_k_dense_replace:
        yield next(golden.experts_cases("prefill", prefill.arrays))


def _rows(golden: BlockGolden, count: int, generator: torch.Generator) -> Tensor:
    """Cache rows [1, count, W] such as a sequence leaves in this layer's cache."""
    c = golden.config
    latent = torch.randn(1, count, c.kv_lora_rank, generator=generator)
    key = torch.randn(1, count, c.qk_rope_head_dim, generator=generator)
    rotated = rotate_interleaved(key, golden.cos[:count], golden.sin[:count])
    normed = golden.block.self_attn.kv_a_layernorm(latent)
    return as_stored(torch.cat([normed, rotated], dim=-1), golden.precision)
