"""Opens a build's tokenizer, whatever its kind."""

from pathlib import Path

from graphs.contract.config import ModelConfig
from graphs.contract.spec import BuildError
from runtime.tokenizers.base import Tokenizer, byte_tokenizer
from runtime.tokenizers.build_json import read_object
from runtime.tokenizers.tiktoken_model import TIKTOKEN_CLASS, tiktoken_tokenizer
from runtime.tokenizers.tokenizer_json import json_tokenizer


def load_tokenizer(build: Path, config: ModelConfig) -> Tokenizer:
    """The tokenizer of the build's files; bytes where there is no file. Raises BuildError.

    Where files of two kinds are there, Kimi's class reads tiktoken.model; any other class is
    refused, since the two files may differ.
    """
    folder = build / "tokenizer"
    tiktoken, exported = folder / "tiktoken.model", folder / "tokenizer.json"
    settings_file = folder / "tokenizer_config.json"
    settings = read_object(settings_file) if settings_file.is_file() else {}
    kind = settings.get("tokenizer_class")
    if tiktoken.is_file() and exported.is_file() and kind != TIKTOKEN_CLASS:
        raise BuildError(
            f"{settings_file}: tokenizer_class: expected {TIKTOKEN_CLASS!r}, since both "
            f"tiktoken.model and tokenizer.json are there, got {kind!r}; remove one of the two"
        )
    if tiktoken.is_file():
        return tiktoken_tokenizer(tiktoken, settings_file, settings, config.vocab_size)
    if exported.is_file():
        return json_tokenizer(exported, settings_file, settings, config.vocab_size)
    if files := sorted(p.name for p in folder.glob("*")):
        raise BuildError(
            f"{folder}: expected tiktoken.model or tokenizer.json, got only {', '.join(files)}; "
            "without a tokenizer, give token ids with --prompt-ids"
        )
    if config.vocab_size < 256:
        raise BuildError(
            f"{build}: vocab_size: expected at least 256, one id a byte, got {config.vocab_size}"
        )
    return byte_tokenizer(config)
