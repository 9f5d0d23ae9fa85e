"""Which kind of tokenizer a build has."""

from pathlib import Path

from graphs.contract.config import ModelConfig
from graphs.contract.spec import BuildError
from runtime.tokenizers.base import Tokenizer, byte_tokenizer
from runtime.tokenizers.build_json import read_object
from runtime.tokenizers.tiktoken_model import TIKTOKEN_CLASS, tiktoken_tokenizer
from runtime.tokenizers.tokenizer_json import json_tokenizer


def load_tokenizer(build: Path, config: ModelConfig) -> Tokenizer:
    """The tokenizer of the build's files; bytes where there is no file. Raises BuildError.

    Of two kinds at once, Kimi's own class reads tiktoken.model and never the other; any other class
    is refused, since the two files may differ.
    """
    folder = build / "tokenizer"
    tiktoken, exported = folder / "tiktoken.model", folder / "tokenizer.json"
    settings_file = folder / "tokenizer_config.json"
    settings = read_object(settings_file) if settings_file.is_file() else {}
    kind = settings.get("tokenizer_class")
    if tiktoken.is_file() and exported.is_file() and kind != TIKTOKEN_CLASS:
        raise BuildError(
            f"{folder}: both tiktoken.model and tokenizer.json, and {settings_file.name} with "
            f"tokenizer_class {TIKTOKEN_CLASS!r}, which reads the former, expected to decide; "
            f"found {kind!r}; remove one of the two"
        )
    if tiktoken.is_file():
        return tiktoken_tokenizer(tiktoken, settings_file, settings, config.vocab_size)
    if exported.is_file():
        return json_tokenizer(exported, settings_file, settings, config.vocab_size)
    if files := sorted(p.name for p in folder.glob("*")):
        raise BuildError(
            f"{folder}: tiktoken.model or tokenizer.json expected, found {', '.join(files)} only; "
            "without a tokenizer, token ids go in with --prompt-ids"
        )
    if config.vocab_size < 256:
        raise BuildError(f"{build}: bytes need a vocabulary of 256, found {config.vocab_size}")
    return byte_tokenizer(config)
