"""A checkpoint's folder: `config.json`, an index, and safetensors shards, read tensor by tensor.

Opening reads every shard's header and checks it against the config: a tensor that is missing, or
has the wrong type, shape or scale grid, is an error before any value is read. Weights and scales
may lie in different shards. Tensors that the config does not call for are either ignored by rule,
and counted in `ignored`, or listed in `unknown`. Values are checked as they are read: a NaN or
infinity is an error that names tensor and index.

Names are the published ones, without the prefix that a multimodal checkpoint puts before those of
its text model.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from export.checkpoint.block_fp8 import BlockFP8, decode
from export.checkpoint.group_int4 import GroupInt4, decode_int4
from export.checkpoint.identity import CheckpointIdentity
from export.checkpoint.shards import CheckpointError, Stored, stored_tensors
from export.checkpoint.tensor_names import expected_tensors
from export.checkpoint.weight_forms import (
    GROUP_SCALE,
    PACKED,
    SCALE_SUFFIX,
    SHAPE,
    check_weight,
    companions,
)
from export.reference.block import ReferenceModel
from graphs.contract.config import TEXT_PREFIX, ModelConfig, load_config, load_raw_config
from graphs.contract.quantization import Int4Groups

INV_FREQ = "self_attn.rotary_emb.inv_freq"

Weight = Tensor | BlockFP8 | GroupInt4


@dataclass(frozen=True)
class Checkpoint:
    """An opened checkpoint (see the module's docstring), made by `Checkpoint.open`."""

    folder: Path
    config: ModelConfig
    raw_config: dict[str, Any]
    shapes: dict[str, tuple[int, ...]]  # of every weight that the config calls for
    stored: dict[str, Stored]
    ignored: dict[str, int]  # rule → number of tensors
    unknown: tuple[str, ...]

    @classmethod
    def open(cls, folder: Path) -> "Checkpoint":
        """Read config, index and headers, and check them. Raises CheckpointError, ConfigError."""
        config, raw_config = load_config(folder), load_raw_config(folder)
        stored = {n.removeprefix(TEXT_PREFIX): t for n, t in stored_tensors(folder).items()}
        nested = "text_config" in raw_config
        expected = expected_tensors(config)
        used = {part for name in expected for part in (name, *companions(name))}
        ignored: Counter[str] = Counter()
        unknown = []
        for name in sorted(set(stored) - used):
            if rule := _ignored(name, config, nested):
                ignored[rule] += 1
            else:
                unknown.append(name)
        missing = [n for n in sorted(expected) if n not in stored and n + PACKED not in stored]
        if missing:
            raise CheckpointError(
                f"{folder}: tensor {missing[0]} is missing ({len(missing)} missing in all); "
                "complete the download"
            )
        for name, shape in expected.items():
            check_weight(name, shape, stored, config)
        return cls(folder, config, raw_config, expected, stored, dict(ignored), tuple(unknown))

    @cached_property
    def identity(self) -> CheckpointIdentity:
        """What tells it from other checkpoints, read when first asked for."""
        return CheckpointIdentity.from_folder(self.folder)

    def sources(self, name: str) -> list[Stored]:
        """The stored tensors that make up a weight: its values or their parts, and its scales."""
        return [self.stored[n] for n in (name, *companions(name)) if n in self.stored]

    def weight(self, name: str) -> Weight:
        """A weight in its stored precision, checked to be finite. Raises CheckpointError."""
        if name + PACKED in self.stored:
            return self._int4(name)
        stored = self.stored[name]
        tensor = stored.read()
        if tensor.dtype != torch.float8_e4m3fn:
            require_finite(name, tensor, stored.shard)
            return tensor
        codes = tensor.view(torch.uint8).numpy()
        for first in range(0, len(codes), 64):  # rows few enough to stay in the processor's cache
            magnitudes = codes[first : first + 64] & 0x7F
            if magnitudes.max(initial=0) == 0x7F:
                require_finite(name, torch.from_numpy(magnitudes != 0x7F), stored.shard, first)
        stored = self.stored[name + SCALE_SUFFIX]
        scale = stored.read().to(torch.float32)
        require_finite(stored.name, scale, stored.shard)
        if (scale < 0).any():
            index = tuple((scale < 0).nonzero()[0].tolist())
            raise CheckpointError(
                f"{stored.name}: expected scales of at least 0, got {float(scale[index])} at index "
                f"{index} in {stored.shard}"
            )
        assert self.config.weight_block_size is not None  # checked when the checkpoint was opened
        return BlockFP8(tensor, scale, self.config.weight_block_size)

    def wide(self, name: str) -> Tensor:
        """A weight as fp32, decoded exactly. Raises CheckpointError."""
        match self.weight(name):
            case BlockFP8() as blocks:
                return decode(blocks)
            case GroupInt4() as groups:
                return decode_int4(groups)
            case tensor:
                return tensor.to(torch.float32)

    def rows(self, name: str, at_once: int) -> Iterator[Tensor]:
        """A 16- or 32-bit weight in pieces of whole rows. Raises CheckpointError."""
        first = 0
        for piece in self.stored[name].rows(at_once):
            require_finite(name, piece, self.stored[name].shard, first)
            first += len(piece)
            yield piece

    def reference(self) -> ReferenceModel:
        """The whole model in fp32, in memory. Raises CheckpointError."""
        model = ReferenceModel(self.config)
        model.load_state_dict({name: self.wide(name) for name in self.shapes})
        return model.requires_grad_(False).eval()

    def _int4(self, name: str) -> GroupInt4:
        assert isinstance(self.config.quantization, Int4Groups)
        packed, scale, shape = (self.stored[name + s].read() for s in (PACKED, GROUP_SCALE, SHAPE))
        rows, columns = self.shapes[name]
        if shape.tolist() != [rows, columns]:
            raise CheckpointError(
                f"{name + SHAPE}: expected {(rows, columns)} from config.json, got "
                f"{tuple(shape.tolist())} in {self.stored[name + SHAPE].shard}"
            )
        require_finite(name + GROUP_SCALE, scale, self.stored[name + GROUP_SCALE].shard)
        return GroupInt4(packed, scale, (rows, columns), self.config.quantization.group_size)


def _ignored(name: str, config: ModelConfig, nested: bool) -> str | None:
    """The rule by which a tensor is ignored, or None."""
    if name.endswith(INV_FREQ):
        return "rotary frequencies, made from config.json"
    last = config.num_hidden_layers
    for layer in range(last, last + config.num_nextn_predict_layers):
        if name.startswith(f"model.layers.{layer}."):
            return f"layer {layer}, which predicts further tokens in training (MTP)"
    if nested and name.startswith(("vision_tower.", "mm_projector.")):
        return "the vision tower and its projector"
    return None


def require_finite(name: str, values: Tensor, shard: Path | None = None, first: int = 0) -> None:
    """Raise CheckpointError at the first value that is NaN or infinite.

    `values`: floating point, or booleans that are true where a value is finite; `shard`: the file
    they were read from; `first`: the tensor's row at which they begin.
    """
    finite = values if values.dtype == torch.bool else torch.isfinite(values)
    if not finite.all():
        row, *rest = finite.logical_not().nonzero()[0].tolist()
        where = "" if shard is None else f" in {shard}"
        raise CheckpointError(
            f"{name}: expected finite values, got NaN or infinity at index {(first + row, *rest)}"
            f"{where}"
        )
