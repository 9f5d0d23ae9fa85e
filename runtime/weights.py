"""A build folder's packed weights, memory-mapped: a file is read where it is touched."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from graphs.spec import EMBED_FILE, HEAD_FILE, ROPE_FILE, BuildSpec, layer_file
from graphs.tensorfile import Array, TensorFile


@dataclass(frozen=True)
class Weights:
    """All weight files of a build, each checked to be whole and to belong to it."""

    embed: Array  # [vocab, D]
    layers: tuple[TensorFile, ...]
    head: TensorFile
    rope: TensorFile

    @classmethod
    def open(cls, build: Path, spec: BuildSpec) -> "Weights":
        """Raises BuildError where a file is absent, damaged, or of another build."""
        layers = range(spec.config.num_hidden_layers)
        return cls(
            TensorFile.open(build / EMBED_FILE, spec.file_metadata("embed"))["embed.weight"],
            tuple(
                TensorFile.open(build / layer_file(i), spec.file_metadata(f"layer {i}"))
                for i in layers
            ),
            TensorFile.open(build / HEAD_FILE, spec.file_metadata("head")),
            TensorFile.open(build / ROPE_FILE, spec.file_metadata("rope")),
        )

    def rows(self, ids: Array) -> Array:
        """Token embeddings [*ids.shape, D] as fp32."""
        return self.embed[ids].astype(np.float32)
