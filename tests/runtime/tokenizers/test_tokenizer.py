"""Tokenizers: Kimi's against a textbook BPE, DeepSeek's against `tokenizers`; BOS, injection."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.tokenizers.base import PromptError, Tokenizer, byte_tokenizer
from runtime.tokenizers.load import load_tokenizer
from runtime.tokenizers.tiktoken_model import PATTERN, parts
from tests.support.tokenizer_builds import (
    PUBLISHED_PATTERN,
    SLOTS,
    SMALL,
    SPECIAL,
    TEXT,
    change_json,
    config,
    deepseek_build,
    deepseek_folder,
    plain_bpe,
    small_build,
    small_json,
    split,
    template,
    train,
    write_kimi,
)

RANKS = train()
VOCAB_SIZE = len(RANKS) + SLOTS
ROOT = Path(__file__).parents[3]

# Assigned characters of Python's Unicode version, so that the engines compared know them all.
TEXTS = st.text(
    st.one_of(
        st.sampled_from("你好世界人工智能〇々𠮷"),
        st.sampled_from("0123456789٣½Ⅷ"),
        st.sampled_from("🙂👨‍👩‍👧️é́ñ"),
        st.sampled_from(" \t\n\r\u3000\u00a0\u2028\x1c"),
        st.sampled_from("abcXYZ'stSTſKrevmld.,!<|>_"),
        st.sampled_from("ひカ한다ответ"),
        st.characters(exclude_categories=["Cs", "Cn"]),
    ),
    max_size=60,
)
examples = settings(max_examples=300, deadline=None, derandomize=True)


@pytest.fixture(scope="module")
def kimi(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    build = tmp_path_factory.mktemp("kimi")
    write_kimi(build, RANKS)
    return load_tokenizer(build, config(VOCAB_SIZE))


@pytest.fixture(scope="module")
def deepseek(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """DeepSeek-V4's own files, as a build has them."""
    return load_tokenizer(deepseek_build(tmp_path_factory.mktemp("deepseek")), config(129_280))


@pytest.fixture(scope="module")
def reference() -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_file(str(deepseek_folder() / "tokenizer.json"))


@pytest.fixture(scope="module")
def every(kimi: Tokenizer, deepseek: Tokenizer) -> list[Tokenizer]:
    return [kimi, deepseek, byte_tokenizer(config(258))]


@pytest.fixture(scope="module")
def small() -> dict[str, Any]:
    return small_json()


def test_the_pattern_is_the_published_one() -> None:
    assert PATTERN == PUBLISHED_PATTERN


@pytest.mark.parametrize(
    "text, expected",
    [
        ("Hello, world! 你好，世界！", "Hello|,| world|!| |你好|，|世界|！"),
        ("camelCase HTTPServer don't DON'T", "camel|Case| HTTPServer| don't| DON'T"),
        ("汉字abc漢ABC", "汉字|abc|漢|ABC"),
        ("1234567", "123|456|7"),
        ("a  b\n\n c", "a| | b|\n\n| c"),
    ],
)
def test_kimi_splits(kimi: Tokenizer, text: str, expected: str) -> None:
    assert split(text) == expected.split("|")
    # no merge crosses a split: each part's ids stand alone
    assert kimi.encode(text) == [i for part in expected.split("|") for i in kimi.encode(part)]


@examples
@given(TEXTS)
def test_kimi_equals_a_plain_bpe(kimi: Tokenizer, text: str) -> None:
    assert kimi.encode(text) == plain_bpe(RANKS, text)


def test_kimi_merges(kimi: Tokenizer) -> None:
    ids = kimi.encode(TEXT)
    assert ids == plain_bpe(RANKS, TEXT)
    assert len(ids) < len(TEXT.encode()) * 0.6 and max(ids) == len(RANKS) - 1


@examples
@given(TEXTS)
def test_what_is_encoded_prints_whole_and_as_a_stream(every: list[Tokenizer], text: str) -> None:
    for tokenizer in every:
        ids = tokenizer.encode(text)
        stream = tokenizer.stream()
        assert "".join([*map(stream.push, ids), stream.finish()]) == text == tokenizer.decode(ids)
        assert not set(ids[len(tokenizer.bos) :]) & set(tokenizer.special.values())


@examples
@given(ids=st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=30))
def test_a_stream_prints_any_ids_like_decode(kimi: Tokenizer, ids: list[int]) -> None:
    stream = kimi.stream()
    assert "".join([*map(stream.push, ids), stream.finish()]) == kimi.decode(ids)


def test_a_character_split_over_tokens_prints_once(kimi: Tokenizer, deepseek: Tokenizer) -> None:
    for tokenizer in (kimi, deepseek):
        ids = tokenizer.ordinary("𠮷")  # in neither vocabulary
        assert len(ids) > 1
        stream = tokenizer.stream()
        pieces = [stream.push(i) for i in ids]
        assert pieces == [""] * (len(ids) - 1) + ["𠮷"] and stream.finish() == ""
        stream = tokenizer.stream()
        assert [stream.push(i) for i in ids[:-1]] == [""] * (len(ids) - 1)
        assert stream.finish() == "\ufffd"


def test_bytes_stream_whole_characters() -> None:
    tokenizer = byte_tokenizer(config(258))
    stream = tokenizer.stream()
    pieces = [stream.push(t) for t in [*"é€".encode(), 257, 0xC3]]
    assert pieces == ["", "é", "", "", "€", "", ""] and stream.finish() == "\ufffd"
    assert tokenizer.encode("é") == [256, *"é".encode()]


def plain_parts(text: str, most: int, longest_run: int) -> Iterator[str]:
    """The published rule, character by character."""
    for start in range(0, len(text), most):
        part, run = "", 0
        for character in text[start : start + most]:
            same = part != "" and part[-1].isspace() == character.isspace()
            run = run + 1 if same else 1
            if run > longest_run:
                yield part
                part, run = "", 1
            part += character
        yield part


@examples
@given(st.text(" \n\u3000\x1cab汉", max_size=40), st.integers(1, 20), st.integers(1, 7))
def test_long_texts_are_cut_where_kimi_cuts_them(text: str, most: int, run: int) -> None:
    assert list(parts(text, most, run)) == list(plain_parts(text, most, run))


@pytest.mark.parametrize("text", [" " * 60_000, "a" * 60_000, "汉" * 30_000, "x\n" * 500_000])
def test_long_runs(kimi: Tokenizer, text: str) -> None:
    assert kimi.decode(kimi.encode(text)) == text


def test_special_tokens_fill_the_embedding_and_no_more(kimi: Tokenizer) -> None:
    first = len(RANKS)
    assert len(kimi.pieces) == VOCAB_SIZE
    for offset, (name, _) in SPECIAL.items():
        assert kimi.special[name] == first + offset
    assert kimi.special[f"<|reserved_token_{first + 5}|>"] == first + 5
    assert set(kimi.special.values()) == set(range(first, VOCAB_SIZE))
    assert kimi.bos == ()


def test_special_tokens_print_as_nothing_and_added_ones_as_their_name(kimi: Tokenizer) -> None:
    ids = [*kimi.special.values()]
    assert kimi.decode([*kimi.ordinary("a"), *ids, *kimi.ordinary("b")]) == "a<|tool_call_begin|>b"


def test_text_never_becomes_a_special_token(every: list[Tokenizer]) -> None:
    for tokenizer in every:
        for name in [*tokenizer.special, "[BOS]", "<|im_end|>", "<｜User｜>", "<think>"]:
            for text in (name, f"a {name}b", name * 2):
                ids = tokenizer.ordinary(text)
                assert not set(ids) & set(tokenizer.special.values())
                assert tokenizer.decode(ids) == text


def test_surrogates_are_refused_but_for_bytes(kimi: Tokenizer, deepseek: Tokenizer) -> None:
    for tokenizer in (kimi, deepseek):
        with pytest.raises(PromptError, match=r"surrogate U\+DCFF .* at character 2"):
            tokenizer.encode("ab\udcff")
    tokenizer = byte_tokenizer(config(258))
    assert tokenizer.ordinary("ab\udcff") == [97, 98, 0xFF]
    with pytest.raises(PromptError, match=r"surrogate U\+D800 .* at character 0"):
        tokenizer.encode("\ud800")


def test_deepseek_known_encodings(deepseek: Tokenizer) -> None:
    """The sample in the readme of the package that the files come from."""
    text = "Hello! 毕老师！1 + 1 = 2 ĠÑĤÐ²ÑĬÑĢ"
    expected = [
        *(19923, 3, 223, 5464, 5008, 1175, 19, 940, 223, 19, 438, 223, 20, 6113, 257, 76589, 131),
        *(100, 76032, 1628, 76589, 131, 108, 76589, 131, 98),
    ]
    assert deepseek.encode(text) == expected and deepseek.decode(expected) == text
    assert deepseek.special["<｜User｜>"] == 128803


@examples
@given(TEXTS)
def test_deepseek_equals_its_pipeline(
    deepseek: Tokenizer, reference: tokenizers.Tokenizer, text: str
) -> None:
    assert deepseek.encode(text) == reference.encode(text).ids


@examples
@given(st.lists(st.integers(0, 129_279), max_size=20))
def test_deepseek_decodes_like_its_pipeline(
    deepseek: Tokenizer, reference: tokenizers.Tokenizer, ids: list[int]
) -> None:
    assert deepseek.decode(ids) == reference.decode(ids)
    assert deepseek.decode([128804, *ids, 128821]) == reference.decode([128804, *ids, 128821])


def test_bos_stands_where_the_files_put_one(tmp_path: Path, small: dict[str, Any]) -> None:
    def bos(name: str, **settings: Any) -> tuple[int, ...]:
        return load_tokenizer(small_build(tmp_path / name, small, **settings), config(SMALL)).bos

    assert bos("v3", add_bos_token=True) == (0,)
    assert bos("string", add_bos_token=True, bos_token="<｜begin▁of▁sentence｜>") == (0,)
    assert bos("v4", add_bos_token=False) == ()
    assert bos("silent", add_bos_token=None) == ()

    small = small | {"post_processor": template("<｜begin▁of▁sentence｜>")}
    build = small_build(tmp_path / "template", small, add_bos_token=None)
    tokenizer = load_tokenizer(build, config(SMALL))
    assert tokenizer.encode("on") == [0, *tokenizer.ordinary("on")]
    assert bos("settings first", add_bos_token=False) == ()


def test_a_file_that_cuts_and_pads_does_neither_here(tmp_path: Path, small: dict[str, Any]) -> None:
    build = small_build(tmp_path, small)
    pad = {"strategy": {"Fixed": 5}, "direction": "Left", "pad_to_multiple_of": None, "pad_id": 2}
    change_json(
        build,
        "tokenizer.json",
        truncation={"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0},
        padding=pad | {"pad_type_id": 0, "pad_token": "<｜▁pad▁｜>"},
    )
    tokenizer = load_tokenizer(build, config(SMALL))
    assert tokenizer.decode(tokenizer.encode("a b c d e f g")) == "a b c d e f g"
    assert len(tokenizer.encode("a")) == 1


def test_bytes_need_no_tokenizer_package_and_the_list_of_commands_no_backend() -> None:
    script = (
        "import sys\n"
        "import runtime.__main__\n"
        "assert not {'onnxruntime', 'runtime.load'} & set(sys.modules)\n"
        "import runtime.commands.generate\n"
        "print([m for m in ('tiktoken', 'tokenizers', 'regex') if m in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"
