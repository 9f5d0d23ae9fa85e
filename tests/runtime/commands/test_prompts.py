"""Prompts of the command line and of files: what they ask for, and what is refused, and where."""

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from graphs.contract.config import ModelConfig
from graphs.contract.manifest import Profile
from runtime.commands import prompts
from runtime.commands.jobs import Job, make_jobs
from runtime.commands.prompts import (
    PromptRequest,
    given_file,
    given_ids,
    given_messages,
    given_texts,
)
from runtime.serving.encoder import Encoder, GenerationOptions
from runtime.serving.sampling import SamplingParams
from runtime.tokenizers.base import PromptError
from runtime.tokenizers.chat import Message
from tests.support.helpers import tiny_config

CONFIG = ModelConfig.from_dict(tiny_config())  # bytes, BOS 256, EOS 257
COMMON: GenerationOptions = {
    "max_new_tokens": 5,
    "sampling": SamplingParams(temperature=0.5, top_k=7, seed=3),
    "stop": ["."],
}
GOOD = [
    {"prompt": "Hello"},
    {"prompt_ids": [1, 2, 3], "id": "third", "temperature": 1, "top_p": 0.9, "seed": 8},
    {"messages": [{"role": "user", "content": "Hi"}], "max_new_tokens": 9, "stop": []},
]
GIVEN = '{"prompt": "a"}'


def written(folder: Path, *lines: str | bytes) -> Path:
    """A file of these lines."""
    path = folder / "prompts.jsonl"
    path.write_bytes(b"\n".join(x if isinstance(x, bytes) else x.encode() for x in lines))
    return path


def jobs(build: Path, asked: list[PromptRequest], profile: Profile | None = None) -> list[Job]:
    return make_jobs(asked, Encoder(build, CONFIG), COMMON, CONFIG, profile)


def test_a_file_of_prompts(tmp_path: Path) -> None:
    first, second, third = map(json.dumps, GOOD)
    asked = given_file(written(tmp_path, first, "", " \t", second, third, ""))
    assert [one.id for one in asked] == [1, "third", 3]
    assert [one.where.partition("prompts.jsonl: ")[2] for one in asked] == [
        "line 1",
        "line 4",
        "line 5",
    ]
    assert asked[0].prompt == "Hello" and asked[1].prompt == [1, 2, 3]
    assert asked[2].prompt == [Message("user", "Hi")]


def test_a_lines_settings_go_before_the_command_lines(tmp_path: Path) -> None:
    asked = given_file(written(tmp_path, *map(json.dumps, GOOD)))
    plain, sampled, longer = (one.options(COMMON) for one in asked)
    assert plain == COMMON
    expected = SamplingParams(temperature=1, top_k=7, top_p=0.9, seed=8)
    assert sampled == COMMON | {"sampling": expected}
    assert longer == COMMON | {"max_new_tokens": 9, "stop": []}
    request = jobs(tmp_path, asked[1:2])[0].request
    assert (request.prompt, request.sampling) == ((1, 2, 3), expected)
    assert (request.max_new_tokens, request.stop_strings) == (5, (".",))
    assert request.stop_ids == {257}


@pytest.mark.parametrize(
    "line, expected",
    [
        ("{", "a JSON object expected, no JSON found"),
        (b"\xff", "a JSON object expected, no JSON found"),
        ("[" * 100_000, "a JSON object expected, no JSON found"),
        ('"Hello"', 'a JSON object expected, found "Hello"'),
        ("{}", "exactly one of prompt, prompt_ids, messages expected, found none"),
        (
            '{"prompt": "a", "prompt_ids": [1]}',
            "exactly one of .* expected, found prompt and prompt_ids",
        ),
        ('{"promt": "a"}', 'keys prompt, .*, stop expected, found "promt"'),
        ('{"prompt": "a", "threads": 2}', 'expected, found "threads"'),
        ('{"prompt": ["a"]}', r'prompt: a string expected, found \["a"\]'),
        ('{"prompt_ids": "1,2"}', 'prompt_ids: a list of whole numbers expected, found "1,2"'),
        ('{"prompt_ids": [1, true]}', r"a list of whole numbers expected, found \[1, true\]"),
        ('{"prompt_ids": [1.0]}', "a list of whole numbers expected"),
        ('{"messages": []}', "messages: .* at least one message expected, found an empty list"),
        ('{"messages": [{"role": "user"}]}', "messages: message 0: content expected, found role"),
        ('{"prompt": "a", "id": 1.5}', "id: a string or a whole number expected, found 1.5"),
        ('{"prompt": "a", "id": null}', "id: a string or a whole number expected, found null"),
        ('{"prompt": "a", "max_new_tokens": 2.0}', "max_new_tokens: a whole number expected"),
        ('{"prompt": "a", "stop": "."}', 'stop: a list of strings expected, found "."'),
        ('{"prompt": "a", "stop": [1]}', r"stop: a list of strings expected, found \[1\]"),
        # the setting's own checks, and the tokenizer's
        ('{"prompt": "a", "max_new_tokens": 0}', "max_new_tokens: at least 1 expected, found 0"),
        ('{"prompt": "a", "temperature": "hot"}', "temperature: a number .*, found 'hot'"),
        ('{"prompt": "a", "temperature": -1}', "temperature: .* expected, found -1"),
        ('{"prompt": "a", "temperature": NaN}', "temperature: .* expected, found nan"),
        ('{"prompt": "a", "top_k": 2.0}', "top_k: a whole number.*, found 2.0"),
        ('{"prompt": "a", "seed": true}', "seed: a whole number.*, found True"),
        ('{"prompt": "a", "stop": [""]}', "none of them empty, expected, found ''"),
        ('{"prompt_ids": []}', "at least one token expected, found none"),
        ('{"prompt_ids": [1, 258]}', r"token 258: below vocab_size \(258\) expected"),
        ('{"prompt_ids": [-1]}', r"token -1: below vocab_size \(258\) expected"),
        ('{"prompt": "\\ud83d"}', r"lone surrogate U\+D83D"),
        (
            '{"prompt_ids": [1, 2], "max_new_tokens": 600}',
            "max_position_embeddings: at most 512 tokens expected, found 601: 2 of the prompt and "
            "up to 600 new ones",
        ),
        ('{"prompt_ids": [1], "max_new_tokens": 65}', "context: at most 64 tokens expected, found"),
    ],
)
def test_a_refused_line_is_named(tmp_path: Path, line: str | bytes, expected: str) -> None:
    path = written(tmp_path, GIVEN, line)
    with pytest.raises(PromptError, match=rf"prompts\.jsonl: line 2: .*{expected}"):
        jobs(tmp_path, given_file(path), Profile(context=64))


@pytest.mark.parametrize(
    "lines, expected",
    [
        ([], "at least one line with a prompt expected, found none"),
        (["", "  "], "at least one line with a prompt expected, found none"),
        (
            ['{"prompt": "a", "id": 2}', GIVEN],
            "line 2: id: one of its own expected, found 2, which is that of line 1",
        ),
    ],
)
def test_a_refused_file(tmp_path: Path, lines: list[str], expected: str) -> None:
    with pytest.raises(PromptError, match=rf"prompts\.jsonl: {expected}"):
        given_file(written(tmp_path, *lines))
    with pytest.raises(PromptError, match="absent: no such file"):
        given_file(tmp_path / "absent")


def test_what_fits_exactly_is_taken(tmp_path: Path) -> None:
    """The last new token is never run, so it needs no row."""
    path = written(tmp_path, '{"prompt_ids": [1, 2], "max_new_tokens": 63}')
    assert jobs(tmp_path, given_file(path), Profile(context=64))[0].request.final_rows == 64
    with pytest.raises(PromptError, match="context: at most 63"):
        jobs(tmp_path, given_file(path), Profile(context=63))


def test_standard_input(monkeypatch: pytest.MonkeyPatch) -> None:
    def feed(content: bytes) -> None:
        monkeypatch.setattr(prompts.sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))

    feed(GIVEN.encode())
    assert [one.prompt for one in given_file(Path("-"))] == ["a"]
    feed(b'[{"role": "user", "content": "Hi"}]')
    assert [one.prompt for one in given_messages(Path("-"))] == [[Message("user", "Hi")]]
    feed(b"{}")
    with pytest.raises(PromptError, match="standard input: line 1: exactly one of"):
        given_file(Path("-"))


@pytest.mark.parametrize(
    "asked, expected",
    [
        (lambda: given_ids(["1,x"]), "^--prompt-ids: whole numbers as 1,2,3 expected, .*'1,x'"),
        (lambda: given_ids(["1", "1,"]), "^--prompt-ids 2: whole numbers"),
        (lambda: given_ids(["258"]), "^--prompt-ids: token 258: below vocab_size"),
        (lambda: given_texts(["a", "b\ud800"]), r"^--prompt 2: .*lone surrogate U\+D800"),
        (lambda: given_texts(["a" * 600]), "^--prompt: max_position_embeddings: at most 512"),
    ],
)
def test_a_refused_prompt_of_the_command_line(
    tmp_path: Path, asked: Callable[[], list[PromptRequest]], expected: str
) -> None:
    with pytest.raises(PromptError, match=expected):
        jobs(tmp_path, asked())


def test_without_a_tokenizer_only_ids_can_be_run(tmp_path: Path) -> None:
    (tmp_path / "tokenizer").mkdir()
    (tmp_path / "tokenizer" / "other").touch()
    common: dict[str, Any] = {"max_new_tokens": 1}
    encoder = Encoder(tmp_path, CONFIG)
    asked = given_ids(["1,2"])
    assert make_jobs(asked, encoder, common, CONFIG, None)[0].request.prompt == (1, 2)
    with pytest.raises(PromptError, match="--prompt-ids: stop strings: a tokenizer expected"):
        make_jobs(asked, encoder, COMMON, CONFIG, None)
    with pytest.raises(Exception, match=r"tiktoken\.model or tokenizer\.json expected"):
        make_jobs(given_texts(["a"]), encoder, common, CONFIG, None)
