"""One layer's weights, from the checkpoint's layout to the engines'.

What changes on the way, and nothing else:
- weights that read the same activation are fused along their outputs: q_a‖kv_a (q‖kv_a where
  queries are projected directly), gate‖up;
- the interleaved rope rows of the query heads and of kv_a_proj_with_mqa are put in half layout;
- kv_b_proj is split into W_UK [H,N,C] and W_UV [H,C,V], in 16 bits (32 in the fp32 build);
- fp8: linear layers become e4m3 with one fp32 scale per output channel, block FP8 in bytes,
  grouped INT4 and wider weights by way of fp32;
- fp32, bf16: FP8 and INT4 are decoded;
- norms, the gate and its bias are fp32.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from export.checkpoint.block_fp8 import BlockFP8, ChannelFP8, channels_from_wide, to_channels
from export.checkpoint.group_int4 import GroupInt4, decode_int4
from export.checkpoint.open import Checkpoint, Weight
from export.checkpoint.shards import Stored
from export.engine.layers import LinearForm
from graphs.contract.tensorfile import DTYPES, Array


@dataclass(frozen=True)
class Source:
    """A linear layer of the checkpoint, its rows in the order the engine wants them."""

    name: str
    rows: Tensor | None = None


def half_layout(width: int) -> Tensor:
    """The row of the checkpoint's interleaved rope part that each row in half layout comes from."""
    return torch.cat([torch.arange(0, width, 2), torch.arange(1, width, 2)])


def channel_fp8(weight: Weight) -> ChannelFP8:
    """A checkpoint weight as the fp8 build has it, outputs in the checkpoint's order."""
    match weight:
        case BlockFP8():
            return to_channels(weight)
        case GroupInt4():
            return channels_from_wide(decode_int4(weight))
        case _:
            return channels_from_wide(weight)


def to_numpy(tensor: Tensor) -> Array:
    """A contiguous numpy view, in ml_dtypes' types where numpy has none."""
    tensor = tensor.contiguous()
    for torch_dtype, carrier, name in (
        (torch.bfloat16, torch.uint16, "bfloat16"),
        (torch.float8_e4m3fn, torch.uint8, "float8e4m3fn"),
    ):
        if tensor.dtype == torch_dtype:
            return tensor.view(carrier).numpy().view(DTYPES[name][1])
    array: Array = tensor.numpy()
    return array


class LayerPacker:
    """Makes the packed tensors of one layer, module by module."""

    def __init__(self, checkpoint: Checkpoint, form: LinearForm, layer: int) -> None:
        self.checkpoint, self.form, self.config = checkpoint, form, checkpoint.config
        self.prefix = f"model.layers.{layer}."

    def pieces(self, module: str) -> dict[str, Iterable[Tensor]]:
        """A module's packed tensors by their last name, weight and scale, or w_uk and w_uv.

        Each comes in pieces of whole rows, some made only when they are read: a fused matrix of
        32-bit weights is too large to be held whole. Raises CheckpointError.
        """
        if module == "attention":
            return {part: [tensor] for part, tensor in self._up_projections().items()}
        if module in self._WIDE:
            sources = self._WIDE[module].items()
            return {part: [self._wide(source)] for part, source in sources if self._has(source)}
        if self.form.fp8:
            return self._fp8_linear(self.sources(module))
        return {"weight": self._wide_linear(self.sources(module))}

    def tensors(self, module: str) -> dict[str, Tensor]:
        """The tensors of `pieces`, whole."""
        return {part: torch.cat(list(pieces)) for part, pieces in self.pieces(module).items()}

    def stored(self, module: str) -> list[Stored]:
        """The stored tensors that `tensors` reads for a module."""
        if module == "attention":
            names = ["self_attn.kv_b_proj.weight"]
        elif module in self._WIDE:
            names = [source for source in self._WIDE[module].values() if self._has(source)]
        else:
            names = [f"{source.name}.weight" for source in self.sources(module)]
        return [stored for n in names for stored in self.checkpoint.sources(self.prefix + n)]

    _WIDE = {  # noqa: RUF012 - a constant table
        "attention.input_norm": {"weight": "input_layernorm.weight"},
        "attention.q_norm": {"weight": "self_attn.q_a_layernorm.weight"},
        "attention.kv_norm": {"weight": "self_attn.kv_a_layernorm.weight"},
        "post_norm": {"weight": "post_attention_layernorm.weight"},
        "gate": {"weight": "mlp.gate.weight", "bias": "mlp.gate.e_score_correction_bias"},
    }

    def sources(self, module: str) -> list[Source]:
        """The linear layers of the checkpoint that make up a packed one, in order."""
        match module.split("."):
            case ["attention", "qkv_a"]:
                return [Source("self_attn.q_a_proj"), self._latent()]
            case ["attention", "qkv"]:
                return [Source("self_attn.q_proj", self._heads()), self._latent()]
            case ["attention", "q_b"]:
                return [Source("self_attn.q_b_proj", self._heads())]
            case ["attention", "o"]:
                return [Source("self_attn.o_proj")]
            case [*path, ("gate_up" | "down") as part]:
                owner = {"mlp": "mlp", "shared": "mlp.shared_experts"}.get(path[0], "mlp.experts")
                prefix = ".".join([owner, *path[1:]])
                names = ("gate_proj", "up_proj") if part == "gate_up" else ("down_proj",)
                return [Source(f"{prefix}.{n}") for n in names]
        raise AssertionError(f"no rule packs {module}")

    def _heads(self) -> Tensor:
        """Rows of a projection to query heads, each head's rope part in half layout."""
        N, R = self.config.qk_nope_head_dim, self.config.qk_rope_head_dim
        head = torch.cat([torch.arange(N), N + half_layout(R)])
        starts = torch.arange(self.config.num_attention_heads)[:, None] * (N + R)
        return (starts + head).flatten()

    def _latent(self) -> Source:
        C, R = self.config.kv_lora_rank, self.config.qk_rope_head_dim
        rows = torch.cat([torch.arange(C), C + half_layout(R)])
        return Source("self_attn.kv_a_proj_with_mqa", rows)

    def _wide_linear(self, sources: list[Source]) -> Iterator[Tensor]:
        for source in sources:
            wide = self._wide(f"{source.name}.weight").to(self.form.activation)
            yield self._rows(wide, source)

    def _fp8_linear(self, sources: list[Source]) -> dict[str, Iterable[Tensor]]:
        weights, scales = [], []
        for source in sources:
            made = channel_fp8(self.checkpoint.weight(f"{self.prefix}{source.name}.weight"))
            weights.append(self._rows(made.weight, source))
            scales.append(self._rows(made.scale, source))
        return {"weight": weights, "scale": scales}

    @staticmethod
    def _rows(tensor: Tensor, source: Source) -> Tensor:
        return tensor if source.rows is None else tensor[source.rows]

    def _up_projections(self) -> dict[str, Tensor]:
        c = self.config
        kv_b = self._wide("self_attn.kv_b_proj.weight").to(self.form.activation)
        per_head = kv_b.view(c.num_attention_heads, -1, c.kv_lora_rank)
        N = c.qk_nope_head_dim
        return {"w_uk": per_head[:, :N], "w_uv": per_head[:, N:].transpose(1, 2)}

    def _wide(self, name: str) -> Tensor:
        return self.checkpoint.wide(self.prefix + name)

    def _has(self, name: str) -> bool:
        return self.prefix + name in self.checkpoint.stored
