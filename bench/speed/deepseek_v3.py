"""transformers' own DeepSeek V3, in fp32, with the weights of a checkpoint of ours."""

from collections.abc import Callable
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM, DynamicCache
from transformers.masking_utils import create_causal_mask
from transformers.models.deepseek_v3 import modeling_deepseek_v3

from export.checkpoint.open import Checkpoint
from export.checkpoint.tensor_names import layer_tensors
from graphs.contract.tensorfile import Array

AttentionKind = Literal["eager", "sdpa"]

# Keys that its config would take for another meaning than the published one: types, code, and FP8,
# since its weights are decoded.
NOT_TAKEN = ("model_type", "architectures", "auto_map", "quantization_config", "torch_dtype")


def deepseek_config(raw: dict[str, Any], attention: AttentionKind, **options: Any) -> Any:
    config = {key: value for key, value in raw.items() if key not in NOT_TAKEN}
    return DeepseekV3Config(**config, dtype="float32", attn_implementation=attention, **options)


def deepseek_state(state: dict[str, Tensor], experts: int) -> dict[str, Tensor]:
    """Our state dict with all experts of a layer in two tensors."""
    fused = dict(state)
    owners = {name.split("experts.0.")[0] for name in state if ".experts.0." in f".{name}"}
    for owner in owners:

        def stack(owner: str, part: str) -> Tensor:
            names = [f"{owner}experts.{expert}.{part}.weight" for expert in range(experts)]
            return torch.stack([fused.pop(name) for name in names])

        gate_up = [stack(owner, "gate_proj"), stack(owner, "up_proj")]
        fused[f"{owner}experts.gate_up_proj"] = torch.cat(gate_up, dim=1)
        fused[f"{owner}experts.down_proj"] = stack(owner, "down_proj")
    return fused


def deepseek_model(checkpoint: Checkpoint, attention: AttentionKind, **options: Any) -> Any:
    """The causal language model. Raises CheckpointError."""
    model = DeepseekV3ForCausalLM(deepseek_config(checkpoint.raw_config, attention, **options))
    state = {name: checkpoint.wide(name) for name in checkpoint.shapes}
    model.load_state_dict(deepseek_state(state, checkpoint.config.n_routed_experts))
    return model.requires_grad_(False).eval()


class DeepseekLayer:
    """A model's first decoder layer; its weights are kept once for both forms of attention."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        """Raises CheckpointError."""
        self.config = deepseek_config(checkpoint.raw_config, "eager")
        config = checkpoint.config
        self.widths = [config.kv_lora_rank, config.qk_rope_head_dim]
        with torch.device("meta"):
            self.layer: Any = modeling_deepseek_v3.DeepseekV3DecoderLayer(self.config, 0)
        names = layer_tensors(config, 0)
        tensors = {n.removeprefix("model.layers.0."): checkpoint.wide(n) for n in names}
        state = deepseek_state(tensors, config.n_routed_experts)
        self.layer.load_state_dict(state, assign=True)
        self.layer.requires_grad_(False).eval()
        self.rotary: Any = modeling_deepseek_v3.DeepseekV3RotaryEmbedding(self.config)

    def step(self, attention: AttentionKind, x_BSD: Array, rows_BLW: Array) -> Callable[[], Array]:
        """A function that runs x behind cached rows and returns y [B,S,D].

        It costs what the model's own `generate` spends on a layer, growing the cache by
        concatenation included. Positions' tables and mask, which all layers share, are made
        beforehand; the cache is cropped after each run, which copies nothing.
        """
        x, L = torch.from_numpy(x_BSD), rows_BLW.shape[1]
        S = x.shape[1]
        cache = DynamicCache()
        if L:
            latent, rope = torch.split(torch.from_numpy(rows_BLW)[:, None], self.widths, dim=-1)
            cache.update(latent.contiguous(), rope.contiguous(), 0)
        positions = torch.arange(L, L + S)[None]
        self.config._attn_implementation = attention
        mask = create_causal_mask(
            config=self.config,
            inputs_embeds=x,
            attention_mask=None,
            cache=cache,
            position_ids=positions,
        )
        tables = self.rotary(x, positions)

        def run() -> Array:
            self.config._attn_implementation = attention
            with torch.inference_mode():
                y = self.layer(
                    x,
                    attention_mask=mask,
                    position_ids=positions,
                    cache=cache,
                    use_cache=True,
                    position_embeddings=tables,
                )
            cache.crop(-S)
            return np.asarray(y)

        return run
