"""Checkpoint → packed weights: one file per layer, in the very layout that the engines read.

What changes on the way, and nothing else:
- weights that read the same activation are fused along their outputs: q_a‖kv_a, gate‖up;
- the interleaved rope rows of q_b_proj and kv_a_proj_with_mqa are put in half layout;
- kv_b_proj is split into W_UK [H,N,C] and W_UV [H,C,V], in 16 bits (32 in the fp32 build);
- fp8: linear layers become e4m3 [in, out] with one fp32 scale per output channel, block FP8 in
  bytes;
- fp32, bf16: linear layers stay [out, in], block FP8 is decoded;
- norms, the gate and its bias are fp32; embedding and lm_head are in the activation's precision.

Which tensors a layer's file holds, and their shapes, is read from the build's spec.
"""

import functools
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from export.block_fp8 import BlockFP8, ChannelFP8, channels_from_wide, to_channels
from export.checkpoint import Checkpoint, layer_tensors
from export.exportable import Form
from export.rope import rope_tables
from graphs.spec import (
    EMBED_FILE,
    HEAD_FILE,
    ROPE_FILE,
    BuildError,
    BuildSpec,
    TensorSpec,
    config_hash,
    layer_file,
)
from graphs.tensorfile import DTYPES, Array, write_arrays, write_tensors

# What a checkpoint may bring along; without any of these the runtime's tokenizer is bytes.
TOKENIZER_FILES = (
    "tiktoken.model",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
)

Progress = Callable[[str, int, int], None]  # file's name, files done, files in all


@dataclass(frozen=True)
class Source:
    """A linear layer of the checkpoint, its rows in the order the engine wants them."""

    name: str
    rows: Tensor | None = None


def half_layout(width: int) -> Tensor:
    """Where each row of a rope part in half layout lies in the checkpoint's interleaved one."""
    return torch.cat([torch.arange(0, width, 2), torch.arange(1, width, 2)])


def channel_fp8(weight: Tensor | BlockFP8) -> ChannelFP8:
    """A checkpoint weight as the fp8 build has it, rows in the checkpoint's order."""
    return to_channels(weight) if isinstance(weight, BlockFP8) else channels_from_wide(weight)


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
    """Makes the packed tensors of one layer by name."""

    def __init__(self, checkpoint: Checkpoint, form: Form, layer: int) -> None:
        self.checkpoint, self.form, self.config = checkpoint, form, checkpoint.config
        self.prefix = f"model.layers.{layer}."
        self.shapes = layer_tensors(checkpoint.config, layer)
        # a layer's weight and scale follow each other: repack once, keep what one fusion needs
        self._channels = functools.lru_cache(maxsize=2)(self._repacked)

    def tensor(self, name: str) -> Tensor:
        """The packed tensor of this name. Raises CheckpointError."""
        module, part = name.rsplit(".", 1)
        if part in ("w_uk", "w_uv"):
            return self._up_projection(part)
        if module == "gate":
            source = "weight" if part == "weight" else "e_score_correction_bias"
            return self._wide(f"mlp.gate.{source}")
        if module in self._NORMS:
            return self._wide(f"{self._NORMS[module]}.weight")
        return self._linear(self._sources(module), part)

    _NORMS = {  # noqa: RUF012 - a constant table
        "attention.input_norm": "input_layernorm",
        "attention.q_norm": "self_attn.q_a_layernorm",
        "attention.kv_norm": "self_attn.kv_a_layernorm",
        "post_norm": "post_attention_layernorm",
    }

    def _sources(self, module: str) -> list[Source]:
        c = self.config
        C, N, R = c.kv_lora_rank, c.qk_nope_head_dim, c.qk_rope_head_dim
        match module.split("."):
            case ["attention", "qkv_a"]:
                rows = torch.cat([torch.arange(C), C + half_layout(R)])
                return [
                    Source("self_attn.q_a_proj"),
                    Source("self_attn.kv_a_proj_with_mqa", rows),
                ]
            case ["attention", "q_b"]:
                head = torch.cat([torch.arange(N), N + half_layout(R)])
                starts = torch.arange(c.num_attention_heads)[:, None] * (N + R)
                return [Source("self_attn.q_b_proj", (starts + head).flatten())]
            case ["attention", "o"]:
                return [Source("self_attn.o_proj")]
            case [*path, ("gate_up" | "down") as part]:
                owner = {"mlp": "mlp", "shared": "mlp.shared_experts"}.get(path[0], "mlp.experts")
                prefix = ".".join([owner, *path[1:]])
                names = ("gate_proj", "up_proj") if part == "gate_up" else ("down_proj",)
                return [Source(f"{prefix}.{n}") for n in names]
        raise AssertionError(f"no rule packs {module}")

    def _linear(self, sources: list[Source], part: str) -> Tensor:
        pieces = [self._piece(source, part) for source in sources]
        whole = torch.cat(pieces)
        return whole.T if self.form.fp8 and part == "weight" else whole

    def _piece(self, source: Source, part: str) -> Tensor:
        if self.form.fp8:
            channels = self._channels(source.name)
            tensor = channels.weight.view(torch.uint8) if part == "weight" else channels.scale
            tensor = tensor if source.rows is None else tensor[source.rows]
            return tensor.view(torch.float8_e4m3fn) if part == "weight" else tensor
        tensor = self._wide(f"{source.name}.weight").to(self.form.activation)
        return tensor if source.rows is None else tensor[source.rows]

    def _repacked(self, source: str) -> ChannelFP8:
        name = f"{self.prefix}{source}.weight"
        return channel_fp8(self.checkpoint.weight(name, self.shapes[name]))

    def _up_projection(self, part: str) -> Tensor:
        c = self.config
        kv_b = self._wide("self_attn.kv_b_proj.weight").to(self.form.activation)
        per_head = kv_b.view(c.num_attention_heads, -1, c.kv_lora_rank)
        if part == "w_uk":
            return per_head[:, : c.qk_nope_head_dim]
        return per_head[:, c.qk_nope_head_dim :].transpose(1, 2)

    def _wide(self, name: str) -> Tensor:
        return self.checkpoint.wide(self.prefix + name, self.shapes[self.prefix + name])


def pack(checkpoint: Checkpoint, build: Path, progress: Progress) -> list[Path]:
    """Write weights, rope tables, tokenizer and generation config; returns the files.

    They are made in a folder beside the build and moved in when all are whole. Raises BuildError
    where the build was exported from another config, CheckpointError where the checkpoint cannot be
    used; the build is as it was then.
    """
    spec = matching_spec(checkpoint, build)
    with tempfile.TemporaryDirectory(dir=build, prefix=".packing_") as folder:
        files = _pack_into(Path(folder), checkpoint, spec, progress)
        (build / "weights").mkdir(exist_ok=True)
        (build / "tokenizer").mkdir(exist_ok=True)
        for file in files:
            (Path(folder) / file).replace(build / file)
    return [build / file for file in files]


def _pack_into(
    folder: Path, checkpoint: Checkpoint, spec: BuildSpec, progress: Progress
) -> list[str]:
    """Write every file below `folder`; returns their paths in it."""
    form = Form.of(spec.precision)
    (folder / "weights").mkdir()
    files = [EMBED_FILE, *(layer_file(i) for i in range(spec.config.num_hidden_layers)), HEAD_FILE]
    for done, file in enumerate(files):
        progress(file, done, len(files))
        if file == EMBED_FILE:
            _write_embedding(checkpoint, form, spec, folder)
        elif file == HEAD_FILE:
            _write_head(checkpoint, spec, folder)
        else:
            _write_layer(checkpoint, form, spec, folder, done - 1)
    cos, sin = (to_numpy(t) for t in rope_tables(spec.config))
    write_arrays(folder / ROPE_FILE, {"cos": cos, "sin": sin}, spec.file_metadata("rope"))
    progress("done", len(files), len(files))
    return [*files, ROPE_FILE, *_copy_tokenizer(checkpoint.folder, folder)]


def matching_spec(checkpoint: Checkpoint, build: Path) -> BuildSpec:
    """The build's spec; raises BuildError where it was exported from another config."""
    spec = BuildSpec.load(build)
    if spec.config_sha256 != config_hash(checkpoint.raw_config):
        raise BuildError(
            f"{build}: exported from another config (hash {spec.config_sha256[:12]}…) than "
            f"{checkpoint.folder} has ({config_hash(checkpoint.raw_config)[:12]}…); choose another "
            "--out, or export the graphs again"
        )
    return spec


def _write_layer(
    checkpoint: Checkpoint, form: Form, spec: BuildSpec, folder: Path, layer: int
) -> None:
    packer = LayerPacker(checkpoint, form, layer)
    specs = spec.layer_tensors(layer)
    shapes = {name: _numpy_shape(t) for name, t in specs.items()}
    tensors = ((name, to_numpy(packer.tensor(name))) for name in specs)
    write_tensors(folder / layer_file(layer), shapes, tensors, spec.file_metadata(f"layer {layer}"))


def _write_embedding(checkpoint: Checkpoint, form: Form, spec: BuildSpec, folder: Path) -> None:
    shape = (spec.config.vocab_size, spec.config.hidden_size)
    array = to_numpy(checkpoint.wide("model.embed_tokens.weight", shape).to(form.activation))
    write_arrays(folder / EMBED_FILE, {"embed.weight": array}, spec.file_metadata("embed"))


def _write_head(checkpoint: Checkpoint, spec: BuildSpec, folder: Path) -> None:
    sources = {"norm.weight": "model.norm.weight", "lm_head.weight": "lm_head.weight"}
    specs = {t.name: t for t in spec.graphs["head"].weights}
    shapes = {name: _numpy_shape(t) for name, t in specs.items()}

    def tensors() -> Iterator[tuple[str, Array]]:
        for name, (dtype, shape) in shapes.items():
            wide = checkpoint.wide(sources[name], shape)
            yield name, to_numpy(wide if dtype == np.float32 else wide.to(torch.bfloat16))

    write_tensors(folder / HEAD_FILE, shapes, tensors(), spec.file_metadata("head"))


def _numpy_shape(spec: TensorSpec) -> tuple[np.dtype[np.generic], tuple[int, ...]]:
    return DTYPES[spec.dtype][1], tuple(int(d) for d in spec.dims)


def _copy_tokenizer(source: Path, folder: Path) -> list[str]:
    (folder / "tokenizer").mkdir()
    wanted = {name: f"tokenizer/{name}" for name in TOKENIZER_FILES}
    wanted["generation_config.json"] = "generation_config.json"
    present = {name: file for name, file in wanted.items() if (source / name).is_file()}
    for name, file in present.items():
        shutil.copyfile(source / name, folder / file)
    return list(present.values())
