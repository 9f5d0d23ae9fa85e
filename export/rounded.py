"""The reference with a precision's rounding: what a build's goldens are compared against.

fp32 and bf16 builds are held against the plain fp32 model. An fp8 build is held against the same
model with the same values rounded: linear layers multiply per-channel e4m3 weights by per-token
e4m3 activations, W_UK, W_UV, embedding and lm_head are bf16. It stays in checkpoint layout, so
fusing, permuting and transposing at packing are all put to the test.
"""

import torch
from torch import Tensor, nn

from export.block import ReferenceModel
from export.block_fp8 import ChannelFP8
from export.checkpoint import Checkpoint, expected_tensors, is_quantised
from export.pack import channel_fp8
from graphs.ops.fp8_linear import reference as fp8_linear
from graphs.spec import Precision


class RoundedLinear(nn.Module):
    """A linear layer with fp8's rounding, its weight decoded once to fp32 [in, out].

    A routed expert reads h from another graph's output, where it was stored as bf16.
    """

    def __init__(self, weight: ChannelFP8, bf16_input: bool) -> None:
        super().__init__()
        self.weight_KN, self.bf16_input = weight.decode().T.contiguous(), bf16_input

    def forward(self, x: Tensor) -> Tensor:
        x = round_bf16(x) if self.bf16_input else x
        flat = fp8_linear(x.reshape(-1, x.shape[-1]), self.weight_KN, torch.ones(()))
        return flat.view(*x.shape[:-1], -1)


def round_bf16(x: Tensor) -> Tensor:
    """To the nearest bf16 value, in the tensor's own dtype."""
    return x.to(torch.bfloat16).to(x.dtype)


def rounded_reference(checkpoint: Checkpoint, precision: Precision) -> ReferenceModel:
    """See the module's docstring. The whole model in memory. Raises CheckpointError."""
    model = checkpoint.reference()
    if precision != "fp8":
        return model
    for tensor in (model.model.embed_tokens.weight, model.lm_head.weight):
        tensor.copy_(round_bf16(tensor))
    shapes = expected_tensors(checkpoint.config)
    for name in filter(is_quantised, shapes):
        parent, child = name.removesuffix(".weight").rsplit(".", 1)
        owner = model.get_submodule(parent)
        if child == "kv_b_proj":
            kv_b = model.get_parameter(name)
            kv_b.copy_(round_bf16(kv_b))
        else:
            channels = channel_fp8(checkpoint.weight(name, shapes[name]))
            reads_h = ".experts." in name and child != "down_proj"
            setattr(owner, child, RoundedLinear(channels, reads_h))
    return model
