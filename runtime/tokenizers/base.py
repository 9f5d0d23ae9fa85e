"""Text to token ids and back: the form of every tokenizer, and the simplest one, bytes.

All kinds here are byte-level: an id stands for a few bytes of UTF-8, not for characters. So a
tokenizer is an encoder and a table of those bytes, and decoding, whole or as a stream, is the same
for all of them.

Special tokens (BOS, the role tokens of a chat) have ids that no text is ever turned into: a prompt
that spells one out gets the tokens of its letters. To use a special token, give its id.
"""

import codecs
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from graphs.contract.config import ModelConfig


class PromptError(ValueError):
    """A prompt that cannot become token ids; says where, what was expected and what it got."""


@dataclass(frozen=True)
class Tokenizer:
    """One model's tokenizer; every id is below its vocab_size."""

    encoder: Callable[[str], list[int]]  # raises UnicodeEncodeError for text that is no UTF-8
    # what each of the vocab_size ids prints as; empty: nothing
    pieces: Sequence[bytes] = field(repr=False)
    special: Mapping[str, int] = field(repr=False)  # special tokens by name
    bos: tuple[int, ...]  # what stands before a prompt; empty for models that put nothing there

    def encode(self, text: str) -> list[int]:
        """A prompt's ids. Raises PromptError."""
        return [*self.bos, *self.ordinary(text)]

    def ordinary(self, text: str) -> list[int]:
        """The text's own ids, none of them special. Raises PromptError."""
        try:
            return self.encoder(text)
        except UnicodeEncodeError as e:
            raise PromptError(
                f"text: expected UTF-8, got the lone surrogate U+{ord(text[e.start]):04X} (a byte "
                f"that is no UTF-8 is read as one) at character {e.start}"
            ) from e

    def spell(self, ids: Iterable[int]) -> bytes:
        """The bytes of ids."""
        return b"".join(self.pieces[i] for i in ids)

    def decode(self, ids: Iterable[int]) -> str:
        """The text of ids; U+FFFD stands for bytes that are no UTF-8."""
        return self.spell(ids).decode(errors="replace")

    def stream(self) -> "TokenDecoder":
        """A decoder of one sequence, token by token."""
        return TokenDecoder(self.pieces, codecs.getincrementaldecoder("utf-8")(errors="replace"))


@dataclass(frozen=True)
class TokenDecoder:
    """Decodes token by token, holding back a character until its last byte has come."""

    pieces: Sequence[bytes]
    decoder: codecs.IncrementalDecoder

    def push(self, token: int) -> str:
        return self.decoder.decode(self.pieces[token])

    def finish(self) -> str:
        """The rest: U+FFFD where the sequence ended within a character, else nothing."""
        return self.decoder.decode(b"", final=True)


def byte_tokenizer(config: ModelConfig) -> Tokenizer:
    """Ids 0–255 are bytes, higher ids are special, and a prompt starts with BOS.

    Bytes that are no UTF-8 may come as the lone surrogates that Python reads them as.
    """
    pieces = [bytes([i]) for i in range(256)]
    return Tokenizer(
        encoder=lambda text: list(text.encode(errors="surrogateescape")),
        pieces=pieces + [b""] * (config.vocab_size - len(pieces)),
        special={},
        bos=(config.bos_token_id,),
    )
