"""A checkpoint's folder: `config.json`, an index, and safetensors shards, read tensor by tensor.

Every tensor that the config calls for must be there with its shape; a tensor that is neither called
for nor ignored by rule is reported by `Checkpoint.unknown`. Weights and scales may sit in different
shards. Values are checked as they are read: a NaN or infinity is an error naming tensor and index.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from export.block import ReferenceModel
from export.block_fp8 import BlockFP8, decode, grid_shape
from graphs.config import ModelConfig, load_config, load_raw_config

INDEX = "model.safetensors.index.json"
SCALE_SUFFIX = "_scale_inv"
IGNORED_SUFFIX = "self_attn.rotary_emb.inv_freq"  # stored by old versions; made from the config


class CheckpointError(ValueError):
    """A checkpoint that cannot be used; names the tensor or file, what was expected and found."""


def layer_tensors(config: ModelConfig, layer: int) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor of one layer, scales apart."""
    D, Q, C = config.hidden_size, config.q_lora_rank, config.kv_lora_rank
    H, N, R = config.num_attention_heads, config.qk_nope_head_dim, config.qk_rope_head_dim
    V, E = config.v_head_dim, config.n_routed_experts
    attention: dict[str, tuple[int, ...]] = {
        "self_attn.q_a_proj.weight": (Q, D),
        "self_attn.q_a_layernorm.weight": (Q,),
        "self_attn.q_b_proj.weight": (H * (N + R), Q),
        "self_attn.kv_a_proj_with_mqa.weight": (C + R, D),
        "self_attn.kv_a_layernorm.weight": (C,),
        "self_attn.kv_b_proj.weight": (H * (N + V), C),
        "self_attn.o_proj.weight": (D, H * V),
        "input_layernorm.weight": (D,),
        "post_attention_layernorm.weight": (D,),
    }

    def swiglu(prefix: str, width: int) -> dict[str, tuple[int, ...]]:
        return {
            f"{prefix}.gate_proj.weight": (width, D),
            f"{prefix}.up_proj.weight": (width, D),
            f"{prefix}.down_proj.weight": (D, width),
        }

    if config.block_type(layer) == "dense":
        feedforward = swiglu("mlp", config.intermediate_size)
    else:
        feedforward = {
            "mlp.gate.weight": (E, D),
            "mlp.gate.e_score_correction_bias": (E,),
            **swiglu("mlp.shared_experts", config.shared_intermediate_size),
        }
        for expert in range(E):
            feedforward |= swiglu(f"mlp.experts.{expert}", config.moe_intermediate_size)
    return {f"model.layers.{layer}.{k}": v for k, v in (attention | feedforward).items()}


def expected_tensors(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor of the model, scales apart."""
    D, vocab = config.hidden_size, config.vocab_size
    tensors: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (vocab, D),
        "model.norm.weight": (D,),
        "lm_head.weight": (vocab, D),
    }
    for layer in range(config.num_hidden_layers):
        tensors |= layer_tensors(config, layer)
    return tensors


def is_quantised(name: str) -> bool:
    """Whether FP8 checkpoints store this tensor as FP8: the linear layers, the gate apart."""
    return name.endswith("_proj.weight") or name.endswith("kv_a_proj_with_mqa.weight")


@dataclass(frozen=True)
class Checkpoint:
    """An opened checkpoint; see the module's docstring. Make it with `Checkpoint.open`."""

    folder: Path
    config: ModelConfig
    raw_config: dict[str, Any]
    shard_of: dict[str, str]
    unknown: tuple[str, ...]
    _open: dict[str, Any] = field(default_factory=dict, repr=False)

    @classmethod
    def open(cls, folder: Path) -> "Checkpoint":
        """Read config and index, and check that every tensor is there. Raises CheckpointError."""
        config = load_config(folder)
        shard_of = _index(folder)
        for shard in sorted(set(shard_of.values())):
            if Path(shard).name != shard or not (folder / shard).is_file():
                raise CheckpointError(f"{folder}: the index names shard {shard!r}, not in there")
        expected = expected_tensors(config)
        if missing := sorted(set(expected) - set(shard_of)):
            raise CheckpointError(
                f"{folder}: tensor {missing[0]} is missing ({len(missing)} missing in all)"
            )
        scales = {name + SCALE_SUFFIX for name in expected if is_quantised(name)}
        unknown = tuple(
            name
            for name in sorted(set(shard_of) - set(expected) - scales)
            if not name.endswith(IGNORED_SUFFIX)
        )
        return cls(folder, config, load_raw_config(folder), shard_of, unknown)

    def read(self, name: str, shape: tuple[int, ...] | None = None) -> Tensor:
        """One tensor as stored. Raises CheckpointError (absent, unreadable, misshapen)."""
        if name not in self.shard_of:
            raise CheckpointError(f"{self.folder}: tensor {name} is missing")
        shard = self.shard_of[name]
        if shard not in self._open:
            self._open[shard] = _open_shard(self.folder / shard)
        try:
            tensor: Tensor = self._open[shard].get_tensor(name)
        except SafetensorError as e:
            raise CheckpointError(f"{self.folder / shard}: cannot read tensor {name}: {e}") from e
        if shape is not None and tuple(tensor.shape) != shape:
            raise CheckpointError(
                f"{name}: shape {shape} expected from config.json, found {tuple(tensor.shape)} "
                f"in {self.folder / shard}"
            )
        return tensor

    def weight(self, name: str, shape: tuple[int, ...]) -> Tensor | BlockFP8:
        """A weight in its stored precision, checked to be finite. Raises CheckpointError."""
        tensor = self.read(name, shape)
        if tensor.dtype != torch.float8_e4m3fn:
            if not tensor.dtype.is_floating_point or tensor.dtype.itemsize == 1:
                raise CheckpointError(
                    f"{name}: bf16, fp16, fp32 or float8_e4m3fn expected, found {tensor.dtype}"
                )
            if name + SCALE_SUFFIX in self.shard_of:
                raise CheckpointError(
                    f"{name}: {tensor.dtype} found beside {name + SCALE_SUFFIX}; a weight with a "
                    "scale grid must be float8_e4m3fn"
                )
            require_finite(name, tensor)
            return tensor
        block = self.config.weight_block_size
        if block is None:
            raise CheckpointError(f"{name}: FP8, but config.json has no quantization_config")
        if not is_quantised(name):
            raise CheckpointError(f"{name}: FP8 found, 16 or 32 bits expected for this tensor")
        require_finite(name, tensor.view(torch.uint8).bitwise_and(0x7F) != 0x7F)
        scale = self.read(name + SCALE_SUFFIX)
        grid = grid_shape(shape, block)
        if tuple(scale.shape) != grid or scale.dtype != torch.float32:
            raise CheckpointError(
                f"{name + SCALE_SUFFIX}: fp32 scale grid {grid} expected for {shape} with "
                f"weight_block_size {block[0]}×{block[1]}, found {scale.dtype} {tuple(scale.shape)}"
            )
        require_finite(name + SCALE_SUFFIX, scale)
        return BlockFP8(tensor, scale, block)

    def wide(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """A weight as fp32, block FP8 decoded exactly. Raises CheckpointError."""
        weight = self.weight(name, shape)
        return decode(weight) if isinstance(weight, BlockFP8) else weight.to(torch.float32)

    def reference(self) -> ReferenceModel:
        """The whole model in fp32; for models that fit in memory. Raises CheckpointError."""
        model = ReferenceModel(self.config)
        expected = expected_tensors(self.config)
        model.load_state_dict({name: self.wide(name, expected[name]) for name in expected})
        return model.requires_grad_(False).eval()


def _index(folder: Path) -> dict[str, str]:
    """Tensor name -> shard's file name, from the index or from the only shard."""
    path = folder / INDEX
    if path.is_file():
        try:
            shard_of = json.loads(path.read_text(encoding="utf-8"))["weight_map"].items()
        except (ValueError, KeyError, TypeError, AttributeError) as e:
            raise CheckpointError(f"{path}: a JSON object with 'weight_map' expected: {e}") from e
        return {str(k): str(v) for k, v in shard_of}
    shards = sorted(folder.glob("*.safetensors"))
    if len(shards) != 1:
        raise CheckpointError(
            f"{folder}: {INDEX} or one .safetensors file expected, found {len(shards)} files"
        )
    return dict.fromkeys(_open_shard(shards[0]).keys(), shards[0].name)


def _open_shard(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as e:
        raise CheckpointError(f"{path}: not a complete safetensors file: {e}") from e


def require_finite(name: str, values: Tensor) -> None:
    """Raises CheckpointError at the first value that is not.

    `values`: floating point, or booleans that say where a value is finite.
    """
    finite = values if values.dtype == torch.bool else torch.isfinite(values)
    if not finite.all():
        index = tuple(finite.logical_not().nonzero()[0].tolist())
        raise CheckpointError(
            f"{name}: NaN or infinity at index {index}; every value must be finite"
        )
