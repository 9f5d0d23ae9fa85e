"""The files of packed weights: what each holds, what it is made from, and the work that makes it.

Which tensors a layer's file holds, and their shapes, is read from the build's spec.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path

import numpy as np
import torch

from export.checkpoint.open import Checkpoint
from export.checkpoint.shards import Stored
from export.engine.layers import LinearForm
from export.packing.layer_weights import LayerPacker, to_numpy
from export.reference.rope import rope_tables
from graphs.contract.spec import (
    EMBED_FILE,
    HEAD_FILE,
    ROPE_FILE,
    BuildError,
    BuildSpec,
    TensorSpec,
    layer_file,
)
from graphs.contract.tensorfile import DTYPES, Array, TensorFile

PACK_FORMAT = 3  # of packed files; another one makes every finished file stale
PIECE = 64 << 20  # bytes of an embedding or head held at a time

Task = Callable[[], Mapping[str, Iterable[Array]]]  # a module's tensors, each in pieces


@dataclass(frozen=True)
class PackedFile:
    """One file of the build: what it holds, what it is made from, and the work that makes it."""

    checkpoint: Checkpoint
    spec: BuildSpec
    path: str  # from the build folder
    content: str
    tensors: Mapping[str, TensorSpec]
    sources: tuple[Stored, ...]
    tasks: tuple[Task, ...]

    @cached_property
    def shapes(self) -> dict[str, tuple[np.dtype[np.generic], tuple[int, ...]]]:
        return {n: (DTYPES[t.dtype][1], t.shape({})) for n, t in self.tensors.items()}

    @property
    def bytes(self) -> int:
        return sum(dtype.itemsize * int(np.prod(shape)) for dtype, shape in self.shapes.values())

    @cached_property
    def source_hash(self) -> str:
        """The hash of everything that the file's content follows from."""
        names = {source.shard.name for source in self.sources}
        shards = [s for s in self.checkpoint.identity.shards if s.name in names]
        content = [
            [PACK_FORMAT, self.spec.precision, self.spec.config_sha256],
            [[n, str(dtype), shape] for n, (dtype, shape) in self.shapes.items()],
            [[s.name, s.bytes, s.header_sha256, s.sample_sha256, s.modified_ns] for s in shards],
            [[s.name, s.shard.name, str(s.dtype), s.shape, s.begin] for s in self.sources],
        ]
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()

    def stamp(self, folder: Path) -> Path:
        path = folder / self.path
        return path.with_name(f".{path.stem}.source")

    @property
    def metadata(self) -> dict[str, str]:
        return self.spec.file_metadata(self.content)

    def finished(self, folder: Path) -> bool:
        """Whether it is in this folder, whole and made from these very sources."""
        try:
            if self.stamp(folder).read_text(encoding="utf-8") != self.source_hash:
                return False
            TensorFile.open(folder / self.path, self.metadata, self.tensors.items())
        except (OSError, BuildError):
            return False
        return True


def packed_files(checkpoint: Checkpoint, spec: BuildSpec) -> Iterator[PackedFile]:
    """All of a build: embedding, layers, head, rope tables."""
    config, form = checkpoint.config, LinearForm.from_precision(spec.precision)

    def rows(name: str, dtype: str) -> Iterator[Array]:
        target = torch.float32 if dtype == "float" else form.activation
        return (to_numpy(piece.to(target)) for piece in checkpoint.rows(name, PIECE))

    def row_file(
        path: str, content: str, names: Mapping[str, str], tensors: Iterable[TensorSpec]
    ) -> PackedFile:
        specs = {t.name: t for t in tensors}

        def make(name: str) -> dict[str, Iterator[Array]]:
            return {name: rows(names[name], specs[name].dtype)}

        tasks = [partial(make, name) for name in names]
        sources = [s for name in names.values() for s in checkpoint.sources(name)]
        return PackedFile(checkpoint, spec, path, content, specs, tuple(sources), tuple(tasks))

    vocabulary = (config.vocab_size, config.hidden_size)
    embed = {"embed.weight": "model.embed_tokens.weight"}
    head = {"norm.weight": "model.norm.weight", "lm_head.weight": "lm_head.weight"}
    table = TensorSpec("embed.weight", spec.cache_dtype, vocabulary)
    yield row_file(EMBED_FILE, "embed", embed, [table])
    for layer in range(config.num_hidden_layers):
        yield _layer(checkpoint, form, spec, layer)
    yield row_file(HEAD_FILE, "head", head, spec.graphs["head"].weights)
    tables = {t.name: t for t in spec.graphs["dense"].inputs if t.kind == "table"}
    yield PackedFile(checkpoint, spec, ROPE_FILE, "rope", tables, (), (partial(_rope, spec),))


def _rope(spec: BuildSpec) -> dict[str, list[Array]]:
    cos, sin = rope_tables(spec.config)
    return {"cos": [to_numpy(cos)], "sin": [to_numpy(sin)]}


def _layer(checkpoint: Checkpoint, form: LinearForm, spec: BuildSpec, layer: int) -> PackedFile:
    packer = LayerPacker(checkpoint, form, layer)
    tensors = spec.layer_tensors(layer)
    modules = tuple(dict.fromkeys(name.rsplit(".", 1)[0] for name in tensors))

    def make(module: str) -> dict[str, Iterator[Array]]:
        made = packer.pieces(module).items()
        return {f"{module}.{part}": map(to_numpy, pieces) for part, pieces in made}

    sources = {stored for module in modules for stored in packer.stored(module)}
    return PackedFile(
        checkpoint,
        spec,
        layer_file(layer),
        f"layer {layer}",
        tensors,
        tuple(sorted(sources, key=lambda s: s.name)),
        tuple(partial(make, module) for module in modules),
    )
