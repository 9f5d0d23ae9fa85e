"""Prompts of the command line and of files: what they ask for, and what is refused, and where."""

import io
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from graphs.contract.config import ModelConfig
from graphs.contract.manifest import Profile
from runtime.commands.generation.jobs import Job, make_jobs
from runtime.commands.generation.prompts import (
    PromptRequest,
    chat_request,
    file_requests,
    id_requests,
    text_requests,
)
from runtime.serving.encoder import Encoder, GenerationOptions
from runtime.serving.sampling import SamplingParams
from runtime.tokenizers.base import PromptError
from runtime.tokenizers.chat import Message
from tests.support.helpers import tiny_config

CONFIG = ModelConfig.from_dict(tiny_config())  # bytes, BOS 256, EOS 257
COMMON = GenerationOptions(5, SamplingParams(temperature=0.5, top_k=7, seed=3), ["."])
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


def jobs(build: Path, requests: list[PromptRequest], profile: Profile | None = None) -> list[Job]:
    return make_jobs(requests, Encoder(build, CONFIG), COMMON, CONFIG, profile)


def test_a_file_of_prompts(tmp_path: Path) -> None:
    first, second, third = map(json.dumps, GOOD)
    requests = file_requests(written(tmp_path, first, "", " \t", second, third, ""))
    assert [one.id for one in requests] == [1, "third", 3]
    assert [one.where.partition("prompts.jsonl: ")[2] for one in requests] == [
        "line 1",
        "line 4",
        "line 5",
    ]
    assert requests[0].prompt == "Hello" and requests[1].prompt == [1, 2, 3]
    assert requests[2].prompt == [Message("user", "Hi")]


def test_a_lines_settings_go_before_the_command_lines(tmp_path: Path) -> None:
    requests = file_requests(written(tmp_path, *map(json.dumps, GOOD)))
    plain, sampled, longer = (one.options(COMMON) for one in requests)
    assert plain == COMMON
    expected = SamplingParams(temperature=1, top_k=7, top_p=0.9, seed=8)
    assert sampled == replace(COMMON, sampling=expected)
    assert longer == replace(COMMON, max_new_tokens=9, stop=[])
    request = jobs(tmp_path, requests[1:2])[0].request
    assert (request.prompt, request.sampling) == ((1, 2, 3), expected)
    assert (request.max_new_tokens, request.stop_strings) == (5, (".",))
    assert request.stop_ids == {257}


@pytest.mark.parametrize(
    "line, expected",
    [
        ("{", "expected a JSON object, got no JSON"),
        (b"\xff", "expected a JSON object, got no JSON"),
        ("[" * 100_000, "expected a JSON object, got no JSON"),
        ('"Hello"', 'expected a JSON object, got "Hello"'),
        ("{}", "expected exactly one of prompt, prompt_ids, messages, got none"),
        (
            '{"prompt": "a", "prompt_ids": [1]}',
            "expected exactly one of .*, got prompt and prompt_ids",
        ),
        ('{"promt": "a"}', 'expected keys prompt, .*, stop, got "promt"'),
        ('{"prompt": "a", "threads": 2}', 'expected keys .*, got "threads"'),
        ('{"prompt": ["a"]}', r'prompt: expected a string, got \["a"\]'),
        ('{"prompt_ids": "1,2"}', 'prompt_ids: expected a list of whole numbers, got "1,2"'),
        ('{"prompt_ids": [1, true]}', r"expected a list of whole numbers, got \[1, true\]"),
        ('{"prompt_ids": [1.0]}', "expected a list of whole numbers"),
        ('{"messages": []}', "messages: expected .* at least one message, got an empty list"),
        ('{"messages": [{"role": "user"}]}', "messages: message 0: expected content, got role"),
        ('{"prompt": "a", "id": 1.5}', "id: expected a string or a whole number, got 1.5"),
        ('{"prompt": "a", "id": null}', "id: expected a string or a whole number, got null"),
        ('{"prompt": "a", "max_new_tokens": 2.0}', "max_new_tokens: expected a whole number"),
        ('{"prompt": "a", "stop": "."}', 'stop: expected a list of strings, got "."'),
        ('{"prompt": "a", "stop": [1]}', r"stop: expected a list of strings, got \[1\]"),
        # the setting's own checks, and the tokenizer's
        ('{"prompt": "a", "max_new_tokens": 0}', "max_new_tokens: expected at least 1, got 0"),
        ('{"prompt": "a", "temperature": "hot"}', "temperature: expected a number .*, got 'hot'"),
        ('{"prompt": "a", "temperature": -1}', "temperature: expected .*, got -1"),
        ('{"prompt": "a", "temperature": NaN}', "temperature: expected .*, got nan"),
        ('{"prompt": "a", "top_k": 2.0}', "top_k: expected a whole number.*, got 2.0"),
        ('{"prompt": "a", "seed": true}', "seed: expected a whole number.*, got True"),
        ('{"prompt": "a", "stop": [""]}', "expected a list of strings that are not empty, got ''"),
        ('{"prompt_ids": []}', "expected at least one token, got none"),
        ('{"prompt_ids": [1, 258]}', "token 258: "),
        ('{"prompt_ids": [-1]}', "token -1: "),
        ('{"prompt": "\\ud83d"}', r"lone surrogate U\+D83D"),
        (
            '{"prompt_ids": [1, 2], "max_new_tokens": 600}',
            "max_position_embeddings: expected at most 512 tokens, got 601: 2 of the prompt and "
            "up to 600 new ones",
        ),
        ('{"prompt_ids": [1], "max_new_tokens": 65}', "context: expected at most 64 tokens, got"),
    ],
)
def test_a_refused_line_is_named(tmp_path: Path, line: str | bytes, expected: str) -> None:
    path = written(tmp_path, GIVEN, line)
    with pytest.raises(PromptError, match=rf"prompts\.jsonl: line 2: .*{expected}"):
        jobs(tmp_path, file_requests(path), Profile(context=64))


@pytest.mark.parametrize(
    "lines, expected",
    [
        ([], "expected at least one line with a prompt, got none"),
        (["", "  "], "expected at least one line with a prompt, got none"),
        (
            ['{"prompt": "a", "id": 2}', GIVEN],
            "line 2: id: expected one that no other line has, got 2, which is that of line 1",
        ),
    ],
)
def test_a_refused_file(tmp_path: Path, lines: list[str], expected: str) -> None:
    with pytest.raises(PromptError, match=rf"prompts\.jsonl: {expected}"):
        file_requests(written(tmp_path, *lines))
    with pytest.raises(PromptError, match="absent: no such file"):
        file_requests(tmp_path / "absent")


def test_what_fits_exactly_is_taken(tmp_path: Path) -> None:
    """The last new token is never run, so it needs no row."""
    path = written(tmp_path, '{"prompt_ids": [1, 2], "max_new_tokens": 63}')
    assert jobs(tmp_path, file_requests(path), Profile(context=64))[0].request.final_rows == 64
    with pytest.raises(PromptError, match="context: expected at most 63"):
        jobs(tmp_path, file_requests(path), Profile(context=63))


def test_standard_input(monkeypatch: pytest.MonkeyPatch) -> None:
    def feed(content: bytes) -> None:
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(content)))

    feed(GIVEN.encode())
    assert [one.prompt for one in file_requests(Path("-"))] == ["a"]
    feed(b'[{"role": "user", "content": "Hi"}]')
    assert [one.prompt for one in chat_request(Path("-"))] == [[Message("user", "Hi")]]
    feed(b"{}")
    with pytest.raises(PromptError, match="standard input: line 1: expected exactly one of"):
        file_requests(Path("-"))


@pytest.mark.parametrize(
    "make_requests, expected",
    [
        (lambda: id_requests(["1,x"]), "^--prompt-ids: expected whole numbers as 1,2,3, got '1,x'"),
        (lambda: id_requests(["1", "1,"]), "^--prompt-ids 2: expected whole numbers"),
        (lambda: id_requests(["258"]), "^--prompt-ids: token 258: "),
        (lambda: text_requests(["a", "b\ud800"]), r"^--prompt 2: .*lone surrogate U\+D800"),
        (
            lambda: text_requests(["a" * 600]),
            "^--prompt: max_position_embeddings: expected at most 512",
        ),
    ],
)
def test_a_refused_prompt_of_the_command_line(
    tmp_path: Path, make_requests: Callable[[], list[PromptRequest]], expected: str
) -> None:
    with pytest.raises(PromptError, match=expected):
        jobs(tmp_path, make_requests())


def test_without_a_tokenizer_only_ids_can_be_run(tmp_path: Path) -> None:
    (tmp_path / "tokenizer").mkdir()
    (tmp_path / "tokenizer" / "other").touch()
    common = GenerationOptions(max_new_tokens=1)
    encoder = Encoder(tmp_path, CONFIG)
    requests = id_requests(["1,2"])
    assert make_jobs(requests, encoder, common, CONFIG, None)[0].request.prompt == (1, 2)
    with pytest.raises(PromptError, match="--prompt-ids: stop strings: expected a tokenizer"):
        make_jobs(requests, encoder, COMMON, CONFIG, None)
    with pytest.raises(Exception, match=r"expected tiktoken\.model or tokenizer\.json"):
        make_jobs(text_requests(["a"]), encoder, common, CONFIG, None)
