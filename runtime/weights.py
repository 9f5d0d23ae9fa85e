"""A build folder's packed weights, memory-mapped: a file is read where it is touched."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from graphs.spec import EMBED_FILE, HEAD_FILE, ROPE_FILE, BuildSpec, TensorSpec, layer_file
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
        config = spec.config

        def read(file: str, content: str, tensors: Iterable[tuple[str, TensorSpec]]) -> TensorFile:
            return TensorFile.open(build / file, spec.file_metadata(content), tensors)

        vocabulary = TensorSpec(
            "embed.weight", spec.cache_dtype, (config.vocab_size, config.hidden_size)
        )
        tables = [t for t in spec.graphs["dense"].inputs if t.kind == "table"]
        embed = read(EMBED_FILE, "embed", [(vocabulary.name, vocabulary)])
        return cls(
            embed[vocabulary.name],
            tuple(
                read(layer_file(i), f"layer {i}", spec.layer_tensors(i).items())
                for i in range(config.num_hidden_layers)
            ),
            read(HEAD_FILE, "head", [(t.name, t) for t in spec.graphs["head"].weights]),
            read(ROPE_FILE, "rope", [(t.name, t) for t in tables]),
        )

    def rows(self, ids: Array) -> Array:
        """Token embeddings [*ids.shape, D] as fp32."""
        return self.embed[ids].astype(np.float32)
