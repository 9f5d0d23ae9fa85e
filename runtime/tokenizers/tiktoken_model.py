"""Kimi's tokenizer: `tiktoken.model`, a byte-level BPE with a token and its rank on every line.

Text is first split by PATTERN, and merges never cross a split: runs of Han stand alone, other
letters go in words that change at most once from upper to lower case, digits in threes. A token's
rank is both its id and the priority of the merge that makes it.

The file holds no special tokens. They have the ids above the ranks, named by tokenizer_config.json
or, where that has no name, `<|reserved_token_ID|>`. Kimi's class (`TikTokenTokenizer`,
tokenization_kimi.py) reserves 258 of them, K2's embedding has rows for 256; here the embedding
decides, and a named token beyond it is refused. That class adds no BOS, and neither do we.
"""

import base64
import itertools
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from graphs.contract.spec import BuildError
from runtime.tokenizers.base import Tokenizer

TIKTOKEN_CLASS = "TikTokenTokenizer"

# The published alternatives, in their order (tokenization_kimi.py, pat_str).
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_BEFORE = r"[^\r\n\p{L}\p{N}]?"
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
PATTERN = "|".join(
    (
        r"[\p{Han}]+",
        f"{_BEFORE}{_UPPER}*{_LOWER}+{_CONTRACTION}",
        f"{_BEFORE}{_UPPER}+{_LOWER}*{_CONTRACTION}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)


def tiktoken_tokenizer(
    path: Path, settings_file: Path, settings: Mapping[str, Any], vocab_size: int
) -> Tokenizer:
    """Read `tiktoken.model` with the content of tokenizer_config.json. Raises BuildError."""
    if (kind := settings.get("tokenizer_class")) != TIKTOKEN_CLASS:
        raise BuildError(
            f"{settings_file}: tokenizer_class: expected {TIKTOKEN_CLASS!r}, whose split pattern "
            f"{path.name} needs, got {kind!r}"
        )
    ranks = read_ranks(path)
    if len(ranks) > vocab_size:
        raise BuildError(
            f"{path}: expected ids below vocab_size ({vocab_size}), got {len(ranks) - 1}"
        )
    names, silent = special_tokens(settings_file, settings, len(ranks), vocab_size)
    pieces = [b""] * vocab_size
    for token, rank in ranks.items():
        pieces[rank] = token
    for name, token_id in names.items():
        pieces[token_id] = b"" if token_id in silent else name.encode()
    return Tokenizer(_encoder(path.name, ranks), pieces, names, bos=())


def read_ranks(path: Path) -> dict[bytes, int]:
    """Every token's rank, which are 0 … n−1; single bytes are all there. Raises BuildError."""
    ranks: dict[bytes, int] = {}
    lines: dict[int, int] = {}  # rank -> the line it stands on
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        if not line:
            continue
        token, rank = _entry(path, number, line)
        if rank in lines:
            raise BuildError(
                f"{path}: line {number}: expected a rank that no other line has, got {rank}, which "
                f"line {lines[rank]} has"
            )
        if token in ranks:
            raise BuildError(
                f"{path}: line {number}: expected a token that no other line has, got {token!r}, "
                f"which line {lines[ranks[token]]} has"
            )
        ranks[token], lines[rank] = rank, number
    for rank in range(len(ranks)):
        if rank not in lines:
            raise BuildError(
                f"{path}: expected ranks 0 to {len(ranks) - 1} for {len(ranks)} tokens, got none "
                f"with {rank}"
            )
    for value in range(256):
        if bytes([value]) not in ranks:
            raise BuildError(f"{path}: expected all 256 single bytes, got none for 0x{value:02x}")
    return ranks


def _entry(path: Path, number: int, line: bytes) -> tuple[bytes, int]:
    try:
        encoded, rank = line.split()
        token = base64.b64decode(encoded, validate=True)
        if not token or not rank.isdigit():
            raise ValueError("empty token or no whole number")
        return token, int(rank)
    except ValueError as e:
        raise BuildError(
            f"{path}: line {number}: expected a token in base64 and its rank, got "
            f"{line[:80].decode(errors='replace')!r} ({e})"
        ) from e


def special_tokens(
    path: Path, settings: Mapping[str, Any], first: int, vocab_size: int
) -> tuple[dict[str, int], frozenset[int]]:
    """Names of the ids from `first` to vocab_size − 1, and which of them print as nothing.

    An added token that the file says is not special (those around tool calls) prints as its name;
    it is kept out of text like the others. Raises BuildError.
    """
    added = settings.get("added_tokens_decoder")
    if not isinstance(added, dict):
        raise BuildError(
            f"{path}: added_tokens_decoder: expected an object, got {type(added).__name__}"
        )
    names = {i: f"<|reserved_token_{i}|>" for i in range(first, vocab_size)}
    silent = set(names)
    for key, entry in added.items():
        match entry:
            case {"content": str(content), "special": bool(special)} if content:
                pass
            case _:
                raise BuildError(
                    f"{path}: added_tokens_decoder: {key}: expected an object with content and "
                    f"special, got {entry!r}"
                )
        if not (key.isascii() and key.isdigit() and int(key) in names):
            raise BuildError(
                f"{path}: added_tokens_decoder: expected ids {first} to {vocab_size - 1} (above "
                f"the ranks, below vocab_size), got {key!r} for {content!r}"
            )
        names[int(key)] = content
        if not special:
            silent.discard(int(key))
    ids = {name: i for i, name in names.items()}
    for i, name in names.items():
        if ids[name] != i:
            raise BuildError(
                f"{path}: added_tokens_decoder: expected one id for a token, got {i} and "
                f"{ids[name]} for {name!r}"
            )
    return ids, frozenset(silent)


def _encoder(name: str, ranks: dict[bytes, int]) -> Callable[[str], list[int]]:
    """tiktoken's BPE over PATTERN; it knows no special token, so it can make none."""
    import tiktoken  # only here: other kinds run without it

    encoding = tiktoken.Encoding(name, pat_str=PATTERN, mergeable_ranks=ranks, special_tokens={})

    def encode(text: str) -> list[int]:
        text.encode()  # tiktoken would replace lone surrogates silently
        return [token for part in parts(text) for token in encoding.encode_ordinary(part)]

    return encode


def parts(text: str, most: int = 400_000, longest_run: int = 25_000) -> Iterator[str]:
    """The text in the parts that Kimi's class encodes one by one.

    Parts of `most` characters, cut again where white space or anything else runs on for longer than
    `longest_run`: on such runs the split and the merges take too long, or too much stack. A cut
    keeps tokens from crossing it, so it has to be where the published class makes it.
    """
    for start in range(0, len(text), most):
        part = text[start : start + most]
        cuts = [
            cut
            for run in re.finditer(r"\s+|\S+", part)
            for cut in range(run.start() + longest_run, run.end(), longest_run)
        ]
        for begin, end in itertools.pairwise((0, *cuts, len(part))):
            yield part[begin:end]
