"""The reference with a precision's rounding, from which a build's goldens are computed.

fp32 and bf16 builds are compared with the plain fp32 model. An fp8 build is compared with the same
model, rounded where the build rounds: linear layers multiply per-channel e4m3 weights by per-token
e4m3 activations; W_UK, W_UV, embedding and lm_head are bf16. It stays in checkpoint layout, so
fusing, permuting and transposing at packing are all tested.

A model that does not fit in memory is made one block at a time. Its routed experts are read from
the checkpoint when a token chooses them: of Kimi K2's 384 in a layer, which take 67 GB in fp32,
a token needs 8.
"""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from export.checkpoint.block_fp8 import ChannelFP8
from export.checkpoint.open import Checkpoint
from export.checkpoint.tensor_names import expected_tensors, is_linear, is_routed, layer_tensors
from export.packing.layer_weights import channel_fp8
from export.reference.attention import RMSNorm
from export.reference.block import Block, ReferenceModel
from export.reference.feedforward import MoE, SwiGLU
from export.reference.rope import rope_tables
from graphs.contract.spec import Precision
from graphs.ops.fp8_linear import reference as fp8_linear

# An fp8 build keeps these in 16 bits: W_UK and W_UV, embedding, lm_head.
_BF16_AT_FP8 = ("kv_b_proj.weight", "embed_tokens.weight", "lm_head.weight")


class RoundedLinear(nn.Module):
    """A linear layer with fp8's rounding, its e4m3 weight held as fp32 [out, in].

    `bf16_input`: a routed expert reads h, which another graph stored as bf16.
    """

    def __init__(self, weight: ChannelFP8, bf16_input: bool) -> None:
        super().__init__()
        self.weight, self.scale = weight.weight.to(torch.float32), weight.scale
        self.bf16_input = bf16_input

    def forward(self, x: Tensor) -> Tensor:
        x = round_bf16(x) if self.bf16_input else x
        y = fp8_linear(x.reshape(-1, x.shape[-1]), self.weight, self.scale)
        return y.view(*x.shape[:-1], -1)


class ChosenExperts(nn.Module):
    """A layer's routed experts, each read from the checkpoint at every access, and not kept."""

    def __init__(self, checkpoint: Checkpoint, layer: int, precision: Precision) -> None:
        super().__init__()
        self.checkpoint, self.layer, self.precision = checkpoint, layer, precision

    def __getitem__(self, expert: int) -> SwiGLU:
        config = self.checkpoint.config
        prefix = f"model.layers.{self.layer}.mlp.experts.{expert}."
        names = [n for n in layer_tensors(config, self.layer) if n.startswith(prefix)]
        with torch.device("meta"):
            module = SwiGLU(config.hidden_size, config.moe_intermediate_size)
        _fill(module, prefix, names, self.checkpoint, self.precision)
        return module


def round_bf16(x: Tensor) -> Tensor:
    """Round to the nearest bf16 value; the dtype stays."""
    return x.to(torch.bfloat16).to(x.dtype)


def rounded_reference(checkpoint: Checkpoint, precision: Precision) -> ReferenceModel:
    """The whole rounded model, in memory. Raises CheckpointError."""
    with torch.device("meta"):
        model = ReferenceModel(checkpoint.config)
    model.cos, model.sin = rope_tables(checkpoint.config)
    _fill(model, "", expected_tensors(checkpoint.config), checkpoint, precision)
    return model


def rounded_block(checkpoint: Checkpoint, layer: int, precision: Precision) -> Block:
    """One rounded block, its routed experts as `ChosenExperts`. Raises CheckpointError."""
    with torch.device("meta"):
        block = Block(checkpoint.config, layer)
    if isinstance(block.mlp, MoE):
        block.mlp.add_module("experts", ChosenExperts(checkpoint, layer, precision))
    names = [n for n in layer_tensors(checkpoint.config, layer) if not is_routed(n)]
    _fill(block, f"model.layers.{layer}.", names, checkpoint, precision)
    return block


def rounded_head(checkpoint: Checkpoint, precision: Precision) -> nn.Sequential:
    """The rounded final norm and lm_head. Raises CheckpointError."""
    config = checkpoint.config
    with torch.device("meta"):
        norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
    _fill(norm, "model.norm.", ["model.norm.weight"], checkpoint, precision)
    _fill(lm_head, "lm_head.", ["lm_head.weight"], checkpoint, precision)
    return nn.Sequential(norm, lm_head)


def _fill(
    module: nn.Module,
    prefix: str,
    names: Iterable[str],
    checkpoint: Checkpoint,
    precision: Precision,
) -> None:
    """Load these tensors into a module on the meta device; their names begin with `prefix`."""
    for name in names:
        path, _, part = name.removeprefix(prefix).rpartition(".")
        if precision == "fp8" and is_linear(name) and not name.endswith(_BF16_AT_FP8):
            parent, _, child = path.rpartition(".")
            reads_h = is_routed(name) and child != "down_proj"
            linear = RoundedLinear(channel_fp8(checkpoint.weight(name)), reads_h)
            setattr(module.get_submodule(parent), child, linear)
            continue
        tensor = checkpoint.wide(name)
        if precision == "fp8" and name.endswith(_BF16_AT_FP8):
            tensor = round_bf16(tensor)
        module.get_submodule(path).load_state_dict({part: tensor}, strict=False, assign=True)
    assert not any(t.is_meta for t in module.state_dict().values()), "a tensor was left out"
    module.requires_grad_(False).eval()
