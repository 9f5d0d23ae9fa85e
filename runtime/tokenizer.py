"""Text to token ids and back. A checkpoint without tokenizer files uses bytes: id = byte."""

import codecs
import json
from dataclasses import dataclass
from pathlib import Path

from graphs.config import ModelConfig
from graphs.spec import BuildError


@dataclass(frozen=True)
class ByteTokenizer:
    """Ids 0–255 are bytes of UTF-8; whatever lies above is special and prints as nothing."""

    bos_token_id: int

    def encode(self, text: str) -> list[int]:
        """BOS, then the text's bytes."""
        return [self.bos_token_id, *text.encode()]

    def decode(self, ids: list[int]) -> str:
        return bytes(i for i in ids if i < 256).decode(errors="replace")

    def stream(self) -> "ByteStream":
        return ByteStream(codecs.getincrementaldecoder("utf-8")(errors="replace"))


@dataclass(frozen=True)
class ByteStream:
    """Decodes token by token, holding back a character until its last byte has come."""

    decoder: codecs.IncrementalDecoder

    def push(self, token: int) -> str:
        return self.decoder.decode(bytes([token])) if token < 256 else ""

    def finish(self) -> str:
        return self.decoder.decode(b"", final=True)


def load_tokenizer(build: Path, config: ModelConfig) -> ByteTokenizer:
    """The build's tokenizer. Raises BuildError where it is of a kind not read yet."""
    if files := sorted(p.name for p in (build / "tokenizer").glob("*")):
        raise BuildError(
            f"{build / 'tokenizer' / files[0]}: this kind of tokenizer is not read yet; pass "
            "token ids with --prompt-ids"
        )
    if config.vocab_size < 256:
        raise BuildError(f"{build}: bytes need a vocabulary of 256, found {config.vocab_size}")
    return ByteTokenizer(config.bos_token_id)


def stop_ids(build: Path, config: ModelConfig) -> frozenset[int]:
    """End-of-text ids of the config and, where there is one, of generation_config.json."""
    path = build / "generation_config.json"
    found = set(config.eos_token_id)
    if path.is_file():
        try:
            eos = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id", [])
        except (ValueError, AttributeError) as e:
            raise BuildError(f"{path}: a JSON object expected: {e}") from e
        found |= set(eos if isinstance(eos, list) else [eos])
    return frozenset(found)
