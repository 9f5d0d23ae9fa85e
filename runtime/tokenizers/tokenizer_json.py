"""`tokenizer.json`, as DeepSeek ships it: the `tokenizers` package runs the file's own pipeline.

Only byte-level tokenizers are read, by the file's decoder: the letters of a token stand for bytes
(GPT-2's alphabet), so a token's bytes are known and the rest is shared with the other kinds.

Added tokens are kept out of text, whatever the file says of them: DeepSeek calls its role tokens
not special, and `tokenizers` would make them from any text that spells them. When decoding, the
file decides: special tokens print as nothing, other added ones as their name.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from graphs.contract.spec import BuildError
from runtime.tokenizers.base import Tokenizer
from runtime.tokenizers.build_json import read_object

if TYPE_CHECKING:
    import tokenizers


def json_tokenizer(
    path: Path, settings_file: Path, settings: Mapping[str, Any], vocab_size: int
) -> Tokenizer:
    """Read `tokenizer.json` with the content of tokenizer_config.json. Raises BuildError."""
    raw = read_object(path)
    added = _added_tokens(path, raw)
    silent = {entry["content"] for entry in added if entry["special"]}
    if not _is_byte_level(raw.get("decoder")):
        raise BuildError(f"{path}: decoder: expected ByteLevel, got {raw.get('decoder')!r}")
    pipeline = _pipeline(path, {**raw, "added_tokens": added})
    vocabulary = pipeline.get_vocab(with_added_tokens=True)
    for letter, byte in _BYTES.items():
        if letter not in vocabulary:  # `tokenizers` would leave such a byte out
            raise BuildError(f"{path}: expected all 256 single bytes, got none for 0x{byte:02x}")
    name, highest = max(vocabulary.items(), key=lambda item: item[1])
    if highest >= vocab_size:
        raise BuildError(
            f"{path}: expected ids below vocab_size ({vocab_size}), got {highest} for {name!r}"
        )
    pieces = [b""] * vocab_size
    for token, token_id in vocabulary.items():
        if token not in silent:
            pieces[token_id] = token_bytes(token)
    special = {entry["content"]: vocabulary[entry["content"]] for entry in added}
    bos = _bos(path, pipeline, settings_file, settings, special)
    return Tokenizer(_encoder(path, pipeline, special), pieces, special, bos)


def _added_tokens(path: Path, raw: Mapping[str, Any]) -> list[dict[str, Any]]:
    added = raw.get("added_tokens", [])
    for entry in added if isinstance(added, list) else [added]:
        match entry:
            case {"content": str(), "special": bool(), "id": int()}:
                continue
        raise BuildError(
            f"{path}: added_tokens: expected a list of objects with id, content and special, got "
            f"{entry!r}"
        )
    return list(added)


def _is_byte_level(decoder: Any) -> bool:
    match decoder:
        case {"type": "ByteLevel"} | {"type": "Sequence", "decoders": [{"type": "ByteLevel"}]}:
            return True
    return False


def _pipeline(path: Path, raw: Mapping[str, Any]) -> "tokenizers.Tokenizer":
    """The file's pipeline, set to make no added token of text and to neither cut nor pad."""
    import tokenizers  # only here: other kinds run without it

    special = [entry | {"special": True} for entry in raw["added_tokens"]]
    try:
        pipeline = tokenizers.Tokenizer.from_str(json.dumps({**raw, "added_tokens": special}))
    except Exception as e:  # the package raises nothing narrower
        raise BuildError(
            f"{path}: expected a file that `tokenizers` can read, got an error: {e}"
        ) from e
    pipeline.encode_special_tokens = True  # as text, that is
    pipeline.no_truncation()
    pipeline.no_padding()
    return pipeline


def _encoder(
    path: Path, pipeline: "tokenizers.Tokenizer", special: Mapping[str, int]
) -> Callable[[str], list[int]]:
    forbidden = frozenset(special.values())

    def encode(text: str) -> list[int]:
        text.encode()  # `tokenizers` refuses lone surrogates as "not a str"
        ids: list[int] = pipeline.encode(text, add_special_tokens=False).ids
        if made := forbidden.intersection(ids):
            raise BuildError(f"{path}: expected no added token from text, got id {min(made)}")
        return ids

    return encode


def _bos(
    path: Path,
    pipeline: "tokenizers.Tokenizer",
    settings_file: Path,
    settings: Mapping[str, Any],
    special: Mapping[str, int],
) -> tuple[int, ...]:
    """The ids before a prompt, set by `add_bos_token`, or by the post-processor without it.

    DeepSeek's post-processors add nothing; V3 gets its BOS from `add_bos_token`, V4 has none.
    """
    if settings.get("add_eos_token"):
        raise BuildError(
            f"{settings_file}: add_eos_token: expected false, since a prompt is to be continued, "
            f"got {settings['add_eos_token']!r}"
        )
    match settings.get("add_bos_token"):
        case False:
            return ()
        case True:
            bos = settings.get("bos_token")
            name = bos.get("content") if isinstance(bos, dict) else bos
            if not isinstance(name, str) or name not in special:
                raise BuildError(
                    f"{settings_file}: bos_token: expected an added token of {path.name}, since "
                    f"add_bos_token is true, got {bos!r}"
                )
            return (special[name],)
        case None:
            text, whole = (pipeline.encode("a", add_special_tokens=s).ids for s in (False, True))
            bos_ids = whole[: len(whole) - len(text)]
            if whole != bos_ids + text:
                raise BuildError(
                    f"{path}: post_processor: expected nothing after the text, got ids {whole} "
                    f"for a text of {text}"
                )
            return tuple(bos_ids)
        case other:
            raise BuildError(
                f"{settings_file}: add_bos_token: expected true or false, got {other!r}"
            )


def _alphabet() -> dict[str, int]:
    """GPT-2's letters for bytes: printable Latin-1 is itself, others follow from U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    shifted = {chr(0x100 + n): byte for n, byte in enumerate(others)}
    return {chr(byte): byte for byte in printable} | shifted


_BYTES = _alphabet()


def token_bytes(token: str) -> bytes:
    """A token's bytes; one with a letter beyond the alphabet is meant literally."""
    if all(letter in _BYTES for letter in token):
        return bytes(_BYTES[letter] for letter in token)
    return token.encode()
