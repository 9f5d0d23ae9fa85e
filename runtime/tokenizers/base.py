"""Text to token ids and back: what every kind of tokenizer comes down to, and the simplest, bytes.

All kinds here are byte-level: an id stands for a few bytes of UTF-8, not for characters. So a
tokenizer is an encoder and a table of those bytes, and decoding, whole or as a stream, is the same
for all of them.

Special tokens (BOS, the role tokens of a chat) have ids that no text is ever turned into: a prompt
that spells one out gets the tokens of its letters. Who wants a special token puts its id in.
"""

import codecs
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from graphs.contract.config import ModelConfig


class PromptError(ValueError):
    """What was to be turned into token ids cannot be; says where, what was expected and found."""


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
                f"text: UTF-8 expected, found the lone surrogate U+{ord(text[e.start]):04X} (as "
                f"which a byte that is no UTF-8 is read) at character {e.start}"
            ) from e

    def spell(self, ids: Iterable[int]) -> bytes:
        """The bytes that ids print as."""
        return b"".join(self.pieces[i] for i in ids)

    def decode(self, ids: Iterable[int]) -> str:
        """The text that ids print as; U+FFFD stands for what is no UTF-8."""
        return self.spell(ids).decode(errors="replace")

    def stream(self) -> "TokenDecoder":
        """Decodes one sequence as it comes."""
        return TokenDecoder(self.pieces, codecs.getincrementaldecoder("utf-8")(errors="replace"))


@dataclass(frozen=True)
class TokenDecoder:
    """Decodes token by token, holding back a character until its last byte has come."""

    pieces: Sequence[bytes]
    decoder: codecs.IncrementalDecoder

    def push(self, token: int) -> str:
        return self.decoder.decode(self.pieces[token])

    def finish(self) -> str:
        """What is left: U+FFFD where the sequence ended within a character, else nothing."""
        return self.decoder.decode(b"", final=True)


def byte_tokenizer(config: ModelConfig) -> Tokenizer:
    """Ids 0–255 are bytes, a prompt starts with BOS, and whatever lies above is special.

    Bytes that are no UTF-8 may come as the lone surrogates that Python reads them as.
    """
    pieces = [bytes([i]) for i in range(256)]
    return Tokenizer(
        encoder=lambda text: list(text.encode(errors="surrogateescape")),
        pieces=pieces + [b""] * (config.vocab_size - len(pieces)),
        special={},
        bos=(config.bos_token_id,),
    )
