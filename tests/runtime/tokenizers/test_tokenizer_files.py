"""Which tokenizer a build has, damaged and refused files, and stop ids."""

import base64
import shutil
from pathlib import Path
from typing import Any

import pytest

from graphs.contract.spec import BuildError
from runtime.serving.stop_ids import stop_ids
from runtime.tokenizers.load import load_tokenizer
from tests.support.tokenizer_builds import (
    SLOTS,
    SMALL,
    SPECIAL,
    TEXT,
    change_json,
    config,
    deepseek_build,
    kimi_settings,
    lines,
    plain_bpe,
    small_build,
    small_json,
    template,
    train,
    write_kimi,
)

RANKS = train()
VOCAB_SIZE = len(RANKS) + SLOTS


@pytest.fixture(scope="module")
def small() -> dict[str, Any]:
    return small_json()


@pytest.mark.parametrize(
    "file, changes, expected",
    [
        (
            "tokenizer.json",
            {"decoder": {"type": "WordPiece"}},
            "decoder: expected ByteLevel, got",
        ),
        ("tokenizer.json", {"decoder": None}, "decoder: expected ByteLevel, got None"),
        (
            "tokenizer.json",
            {"model": {"type": "BPE"}},
            "expected a file that `tokenizers` can read",
        ),
        (
            "tokenizer.json",
            {"added_tokens": [{"id": 0}]},
            "added_tokens: expected a list of objects with id",
        ),
        ("tokenizer.json", {"added_tokens": None}, "added_tokens: expected a list .* got None"),
        (
            "tokenizer.json",
            {"model": {"type": "BPE", "vocab": {"a": 0}, "merges": []}},
            "expected all 256 single bytes, got none for 0x21",
        ),
        (
            "tokenizer.json",
            {"post_processor": template("", "<｜end▁of▁sentence｜>")},
            "post_processor: expected nothing after the text, got ids",
        ),
        ("tokenizer_config.json", {"add_eos_token": True}, "add_eos_token: expected false.*True"),
        (
            "tokenizer_config.json",
            {"add_bos_token": "yes"},
            "add_bos_token: expected true or false.*'yes'",
        ),
        (
            "tokenizer_config.json",
            {"add_bos_token": True, "bos_token": "<s>"},
            "bos_token: expected an added token of tokenizer.json.*'<s>'",
        ),
    ],
)
def test_a_refused_tokenizer_json(
    tmp_path: Path, small: dict[str, Any], file: str, changes: dict[str, Any], expected: str
) -> None:
    build = small_build(tmp_path, small, add_bos_token=None)
    change_json(build, file, **changes)
    with pytest.raises(BuildError, match=expected) as error:
        load_tokenizer(build, config(SMALL))
    assert str(build / "tokenizer" / file) in str(error.value)


def test_ids_beyond_the_embedding_are_refused(tmp_path: Path) -> None:
    with pytest.raises(
        BuildError, match=r"below vocab_size \(129279\), got .*129279 for '<｜image｜>'"
    ):
        load_tokenizer(deepseek_build(tmp_path / "deepseek"), config(129_279))
    kimi = tmp_path / "kimi"
    write_kimi(kimi, RANKS)
    last = len(RANKS) + max(SPECIAL)
    with pytest.raises(BuildError, match=rf"below vocab_size.*got '{last}' for '<\|im_middle"):
        load_tokenizer(kimi, config(last))
    with pytest.raises(BuildError, match=rf"vocab_size \(300\), got {len(RANKS) - 1}"):
        load_tokenizer(kimi, config(300))


def token(text: bytes) -> str:
    return base64.b64encode(text).decode()


@pytest.mark.parametrize(
    "line, becomes, expected",
    [
        (3, "!!!! 3", r"line 4: expected a token in base64 and its rank, got '!!!! 3'"),
        (3, token(b"ab"), "line 4: expected a token in base64 and its rank, got 'YWI='"),
        (3, f"{token(b'ab')} x", "line 4: expected a token in base64 and its rank"),
        (3, f"{token(b'ab')} -3", "line 4: expected a token in base64 and its rank"),
        (3, f"{token(b'ab')} 3 3", "line 4: expected a token in base64 and its rank"),
        (3, "= 3", "line 4: expected a token in base64 and its rank"),
        (300, f"{token(b'abcdef')} 299", "line 301: expected a rank .*, got 299, .* 300"),
        (
            300,
            f"{token(b'a')} 300",
            r"line 301: expected a token .*, got b'a', .* line \d",
        ),
        (
            300,
            f"{token(b'abcdef')} 900",
            "expected ranks 0 to 375 for 376 tokens, got none with 300",
        ),
        (300, None, "expected ranks 0 to 374 for 375 tokens, got none with 300"),
        (9, f"{token(b'abcdef')} 9", "expected all 256 single bytes, got none for 0x"),
    ],
)
def test_a_damaged_tiktoken_model(
    tmp_path: Path, line: int, becomes: str | None, expected: str
) -> None:
    folder = write_kimi(tmp_path, RANKS)
    content = lines(RANKS)
    content[line : line + 1] = [] if becomes is None else [becomes]
    (folder / "tiktoken.model").write_text("\n".join(content))
    with pytest.raises(BuildError, match=expected) as error:
        load_tokenizer(tmp_path, config(VOCAB_SIZE))
    assert str(folder / "tiktoken.model") in str(error.value)


def test_an_empty_tiktoken_model(tmp_path: Path) -> None:
    (write_kimi(tmp_path, RANKS) / "tiktoken.model").write_text("\n\n")
    with pytest.raises(BuildError, match="expected all 256 single bytes, got none for 0x00"):
        load_tokenizer(tmp_path, config(VOCAB_SIZE))


def added(**changes: Any) -> dict[str, Any]:
    tokens: dict[str, Any] = kimi_settings(len(RANKS))["added_tokens_decoder"]
    return tokens | changes


@pytest.mark.parametrize(
    "changes, expected",
    [
        (
            {"tokenizer_class": "LlamaTokenizer"},
            "tokenizer_class: expected 'TikTokenTokenizer'.*Llama",
        ),
        ({"tokenizer_class": None}, "tokenizer_class: expected 'TikTokenTokenizer'.*None"),
        (
            {"added_tokens_decoder": None},
            "added_tokens_decoder: expected an object, got NoneType",
        ),
        (
            {"added_tokens_decoder": added(**{"380": "[X]"})},
            r"380: expected an object .* got '\[X\]'",
        ),
        (
            {"added_tokens_decoder": added(**{"380": {"content": 1, "special": True}})},
            "380: expected an object with content and special",
        ),
        (
            {"added_tokens_decoder": added(**{"5": {"content": "[X]", "special": True}})},
            r"expected ids 376 to 399 .*got '5' for '\[X\]'",
        ),
        (
            {"added_tokens_decoder": added(**{"400": {"content": "[X]", "special": True}})},
            r"expected ids 376 to 399 .*below vocab_size\), got '400' for '\[X\]'",
        ),
        (
            {"added_tokens_decoder": added(**{"x": {"content": "[X]", "special": True}})},
            "expected ids 376 to 399 .*got 'x'",
        ),
        (
            {"added_tokens_decoder": added(**{"380": {"content": "[BOS]", "special": True}})},
            r"expected one id for a token, got 376 and 380 for '\[BOS\]'",
        ),
    ],
)
def test_refused_settings_of_kimi(tmp_path: Path, changes: dict[str, Any], expected: str) -> None:
    folder = write_kimi(tmp_path, RANKS, **changes)
    with pytest.raises(BuildError, match=expected) as error:
        load_tokenizer(tmp_path, config(VOCAB_SIZE))
    assert str(folder / "tokenizer_config.json") in str(error.value)


@pytest.mark.parametrize("content", ["{", "[1]", "\xff", "[" * 100_000])
def test_json_that_cannot_be_read(tmp_path: Path, content: str) -> None:
    folder = write_kimi(tmp_path, RANKS)
    (folder / "tokenizer_config.json").write_bytes(content.encode("latin-1"))
    with pytest.raises(BuildError, match=r"tokenizer_config\.json: expected a JSON object"):
        load_tokenizer(tmp_path, config(VOCAB_SIZE))
    (folder / "tokenizer_config.json").unlink()
    (folder / "tiktoken.model").rename(folder / "tokenizer.json")
    (folder / "tokenizer.json").write_bytes(content.encode("latin-1"))
    with pytest.raises(BuildError, match=r"tokenizer\.json: expected a JSON object"):
        load_tokenizer(tmp_path, config(VOCAB_SIZE))


def test_which_kind_a_build_has(tmp_path: Path, small: dict[str, Any]) -> None:
    assert load_tokenizer(tmp_path, config(258)).encode("a") == [256, 97]
    with pytest.raises(BuildError, match=r"vocab_size: expected at least 256, .* got 255"):
        load_tokenizer(tmp_path, config(255))

    both = small_build(tmp_path / "both", small)
    shutil.copy(write_kimi(tmp_path / "kimi", RANKS) / "tiktoken.model", both / "tokenizer")
    with pytest.raises(BuildError, match=r"both tiktoken\.model and tokenizer\.json.*'PreTrained"):
        load_tokenizer(both, config(SMALL))
    write_kimi(both, RANKS)  # now with the settings of Kimi's own class, which reads tiktoken.model
    assert load_tokenizer(both, config(VOCAB_SIZE)).encode(TEXT) == plain_bpe(RANKS, TEXT)

    (both / "tokenizer" / "tiktoken.model").unlink()
    (both / "tokenizer" / "tokenizer.json").unlink()
    with pytest.raises(BuildError, match=r"got only tokenizer_config\.json"):
        load_tokenizer(both, config(VOCAB_SIZE))
    (tmp_path / "kimi" / "tokenizer" / "tokenizer_config.json").unlink()
    with pytest.raises(BuildError, match="tokenizer_class: expected 'TikTokenTokenizer'"):
        load_tokenizer(tmp_path / "kimi", config(VOCAB_SIZE))


@pytest.mark.parametrize(
    "eos, expected",
    [("7", {2, 7}), ("[7, 8]", {2, 7, 8}), ("null", {2}), ("[]", {2}), ("2", {2})],
)
def test_stop_ids_join_config_and_generation_config(
    tmp_path: Path, eos: str, expected: set[int]
) -> None:
    assert stop_ids(tmp_path, config(VOCAB_SIZE)) == {2}
    (tmp_path / "generation_config.json").write_text("{}")
    assert stop_ids(tmp_path, config(VOCAB_SIZE)) == {2}
    (tmp_path / "generation_config.json").write_text(f'{{"eos_token_id": {eos}}}')
    assert stop_ids(tmp_path, config(VOCAB_SIZE)) == expected


@pytest.mark.parametrize(
    "content, expected",
    [
        ('{"eos_token_id": "7"}', r"below vocab_size \(400\).*, got '7'"),
        ('{"eos_token_id": [7, 400]}', r"below vocab_size \(400\).*, got \[7, 400\]"),
        ('{"eos_token_id": -1}', "eos_token_id: expected a whole number.*, got -1"),
        ('{"eos_token_id": true}', "eos_token_id: expected a whole number.*, got True"),
        ('{"eos_token_id": 7.0}', "eos_token_id: expected a whole number.*, got 7.0"),
        ('{"eos_token_id": [[7]]}', r"eos_token_id: expected a whole number.*, got \[\[7\]\]"),
        ("[7]", "expected a JSON object, got list"),
        ("{", "expected a JSON object, got no JSON"),
    ],
)
def test_refused_stop_ids(tmp_path: Path, content: str, expected: str) -> None:
    (tmp_path / "generation_config.json").write_text(content)
    with pytest.raises(BuildError, match=expected) as error:
        stop_ids(tmp_path, config(VOCAB_SIZE))
    assert str(tmp_path / "generation_config.json") in str(error.value)
