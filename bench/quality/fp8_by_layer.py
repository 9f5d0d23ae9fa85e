"""The torch reference with one kind of linear layer in fp8 and all others wide.

One kind at a time is rounded as in an fp8 build: its weight to e4m3 per output channel and its
input to e4m3 per token. So where a model loses more than it may, this shows which layers to keep in
16 bits.
"""

import re

from export.checkpoint.open import Checkpoint
from export.checkpoint.tensor_names import is_routed
from export.golden.rounded import RoundedLinear
from export.packing.layer_weights import channel_fp8
from export.reference.block import ReferenceModel

# Kind, as the packed weights call it -> the checkpoint's names that are fused or repeated in it.
KINDS = {
    "attention.qkv_a": r"self_attn\.(q_a_proj|q_proj|kv_a_proj_with_mqa)",
    "attention.q_b": r"self_attn\.q_b_proj",
    "attention.o": r"self_attn\.o_proj",
    "mlp.gate_up": r"mlp\.(gate|up)_proj",
    "mlp.down": r"mlp\.down_proj",
    "shared.gate_up": r"mlp\.shared_experts\.(gate|up)_proj",
    "shared.down": r"mlp\.shared_experts\.down_proj",
    "experts.gate_up": r"mlp\.experts\.\d+\.(gate|up)_proj",
    "experts.down": r"mlp\.experts\.\d+\.down_proj",
}


def kind_of(name: str) -> str | None:
    """The kind of a weight; None for what stays wide."""
    for kind, pattern in KINDS.items():
        if re.fullmatch(rf"model\.layers\.\d+\.{pattern}\.weight", name):
            return kind
    return None


def with_fp8(checkpoint: Checkpoint, *kinds: str) -> ReferenceModel:
    """The reference with these kinds in fp8; the whole model in memory. Raises CheckpointError."""
    model = checkpoint.reference()
    for name in checkpoint.shapes:
        if kind_of(name) in kinds:
            parent, _, child = name.removesuffix(".weight").rpartition(".")
            reads_h = is_routed(name) and child != "down_proj"
            linear = RoundedLinear(channel_fp8(checkpoint.weight(name)), reads_h)
            setattr(model.get_submodule(parent), child, linear)
    return model
