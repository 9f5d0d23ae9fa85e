"""A checkpoint of random weights in the exact on-disk format of a preset, at any size.

With it the whole pipeline, or a few layers at full width, can be tried without a download. Tensors
that inference does not use are left out: layers for training only, and a vision tower.
Values keep activations near 1: weights have a standard deviation of about 1/√fan_in, norms are near
1, correction biases are a few percent. Every tensor has a separate random stream, made from the
seed and the tensor's name. So the same seed gives the same bytes, however tensors are spread over
shards, and a layer of a model cut down to fewer layers is that layer of the larger one.

A folder is always written as a whole. Only an earlier output of this module, recognised by its file
`synthetic.json`, is overwritten.
"""

import copy
import functools
import math
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from export.checkpoint.block_fp8 import E4M3, grid_shape
from export.checkpoint.group_int4 import packed_shape, scale_shape
from export.checkpoint.shards import INDEX, CheckpointError
from export.checkpoint.tensor_names import expected_tensors, is_linear, is_routed
from export.checkpoint.weight_forms import GROUP_SCALE, PACKED, SCALE_SUFFIX, SHAPE
from export.synthetic.random_weights import (
    E4M3_DEVIATION,
    NIBBLE_DEVIATION,
    Draw,
    e4m3_bytes,
    nibbles,
    random_bytes,
    scales,
    to_powers_of_two,
    uniform,
    uniform_rms,
)
from export.synthetic.write_checkpoint import write_indented_json
from export.synthetic.write_shards import NewTensor, ShardProgress, write_shards
from graphs.contract.config import TEXT_PREFIX, ModelConfig
from graphs.contract.quantization import FP8Blocks, Int4Groups

MARK = "synthetic.json"
SHARD_BYTES = 4_000_000_000
NORM_SPREAD, BIAS_SPREAD = 0.2, 0.05  # to either side of 1 and of 0


def reduced(
    raw_config: Mapping[str, Any],
    layers: int | None = None,
    dense: int | None = None,
    vocab: int | None = None,
) -> dict[str, Any]:
    """The config of a smaller model of the same width: fewer layers, dense layers or tokens.

    BOS and EOS become the last two tokens where they lie beyond the smaller vocabulary.
    """
    raw = copy.deepcopy(dict(raw_config))
    text = raw.get("text_config", raw)
    if layers is not None:
        text["num_hidden_layers"] = layers
        text["first_k_dense_replace"] = min(text["first_k_dense_replace"], layers)
    if dense is not None:
        text["first_k_dense_replace"] = dense
    if vocab is not None:
        text["vocab_size"] = vocab
    last = text["vocab_size"] - 1
    for level in (raw, text):
        for key, token in (("bos_token_id", last - 1), ("eos_token_id", last)):
            ids = level.get(key)
            if ids is not None and np.max(ids) > last:
                level[key] = token
    return raw


def write_synthetic(
    raw_config: Mapping[str, Any],
    folder: Path,
    seed: int,
    progress: ShardProgress,
    shard_bytes: int = SHARD_BYTES,
) -> list[Path]:
    """Write a checkpoint; `config.json` comes last, so that an unfinished one cannot be opened.

    Raises ConfigError, and CheckpointError where the folder holds other files or the disk is too
    small, before anything is changed.
    """
    tensors = list(_tensors(raw_config, seed))
    earlier = _earlier_output(folder)
    _require_space(folder, sum(t.bytes for t in tensors), earlier)
    for file in earlier:
        file.unlink()
    folder.mkdir(parents=True, exist_ok=True)
    write_indented_json(folder / MARK, {"written_by": "python -m export synthetic", "seed": seed})
    files = write_shards(folder, tensors, shard_bytes, progress)
    write_indented_json(folder / "config.json", raw_config)
    return [*files, folder / "config.json"]


def _tensors(raw_config: Mapping[str, Any], seed: int) -> Iterator[NewTensor]:
    """All tensors of the checkpoint. Raises ConfigError."""
    config = ModelConfig.from_dict(raw_config)
    prefix = TEXT_PREFIX if "text_config" in raw_config else ""
    powers = (raw_config.get("quantization_config") or {}).get("scale_fmt") == "ue8m0"

    def drawn(name: str, dtype: torch.dtype, shape: tuple[int, ...], draw: Draw) -> NewTensor:
        size = dtype.itemsize * math.prod(shape)
        pieces = functools.partial(random_bytes, seed, name, size, draw)
        return NewTensor(prefix + name, dtype, shape, pieces)

    for name, shape in expected_tensors(config).items():
        deviation = 1.0 if name.endswith("embed_tokens.weight") else shape[-1] ** -0.5
        match config.quantization:
            case FP8Blocks(block=block_size) if is_linear(name):
                grid, scale = grid_shape(shape, block_size), scales(deviation / E4M3_DEVIATION)
                if powers:
                    scale = to_powers_of_two(scale)
                yield drawn(name, E4M3, shape, e4m3_bytes)
                yield drawn(name + SCALE_SUFFIX, torch.float32, grid, scale)
            case Int4Groups(group_size=group_size) if is_routed(name):
                grid = scale_shape(shape, group_size)
                scale = scales(deviation / NIBBLE_DEVIATION, torch.bfloat16)
                sizes = np.array(shape, np.int32).view(np.uint8)
                yield drawn(name + PACKED, torch.int32, packed_shape(shape), nibbles)
                yield drawn(name + GROUP_SCALE, torch.bfloat16, grid, scale)
                yield NewTensor(
                    prefix + name + SHAPE, torch.int32, (2,), functools.partial(iter, [sizes])
                )
            case _ if name.endswith("e_score_correction_bias"):
                yield drawn(name, torch.float32, shape, uniform(torch.float32, 0, BIAS_SPREAD))
            case _ if name.endswith("norm.weight"):
                yield drawn(name, torch.bfloat16, shape, uniform(torch.bfloat16, 1, NORM_SPREAD))
            case _:
                draw = uniform(torch.bfloat16, 0, deviation / uniform_rms(0, 1))
                yield drawn(name, torch.bfloat16, shape, draw)


def _earlier_output(folder: Path) -> list[Path]:
    """Files of an earlier run, finished or not. Raises CheckpointError where there are others."""
    if not folder.exists() or not any(folder.iterdir()):
        return []
    if not (folder / MARK).is_file():
        raise CheckpointError(
            f"{folder}: expected an empty folder or an earlier synthetic checkpoint (with {MARK}), "
            "got other files; choose another --out"
        )
    # the last * covers temporary files of a killed run
    patterns = ("model-*-of-*.safetensors*", f"{INDEX}*", "config.json*")
    return [file for pattern in patterns for file in folder.glob(pattern)]


def _require_space(folder: Path, needed: int, earlier: list[Path]) -> None:
    """Raise CheckpointError where the disk is too small, even without the earlier output."""
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    free = shutil.disk_usage(existing).free + sum(file.stat().st_size for file in earlier)
    if needed > free:
        raise CheckpointError(
            f"{folder}: expected {needed / 1e9:.1f} GB of free disk, got {free / 1e9:.1f} GB; give "
            "fewer --layers, or choose another --out"
        )
