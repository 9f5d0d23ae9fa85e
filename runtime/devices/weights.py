"""A build folder's packed weights, memory-mapped: a file is read where it is touched."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from graphs.contract.spec import EMBED_FILE, HEAD_FILE, ROPE_FILE, BuildSpec, TensorSpec, layer_file
from graphs.contract.tensorfile import Array, TensorFile

VERIFIED_BELOW = 64 * 2**20  # bytes of a file whose checksums are recomputed at every load


@dataclass(frozen=True)
class Weights:
    """All weight files of a build, each checked to be whole and to belong to it."""

    embed: Array  # [vocab, D]
    layers: tuple[TensorFile, ...]
    head: TensorFile
    rope: TensorFile

    @classmethod
    def open(cls, build: Path, spec: BuildSpec, verify: bool = False) -> "Weights":
        """Raises BuildError where a file is absent, damaged, or of another build or layer.

        Sizes, header and identity of every file are checked; checksums of the small ones, and of
        all with `verify`, which reads them whole.
        """
        config = spec.config

        def read(file: str, content: str, tensors: Iterable[tuple[str, TensorSpec]]) -> TensorFile:
            opened = TensorFile.open(build / file, spec.file_metadata(content), tensors)
            if verify or opened.path.stat().st_size < VERIFIED_BELOW:
                opened.verify()
            return opened

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

    @property
    def device_bytes(self) -> int:
        """Bytes of all tensors that runs read; the embedding stays on the host."""
        files = (*self.layers, self.head, self.rope)
        return sum(array.nbytes for file in files for array in file.tensors.values())

    def rows(self, ids: Array) -> Array:
        """Token embeddings [*ids.shape, D] as fp32."""
        return self.embed[ids].astype(np.float32)
