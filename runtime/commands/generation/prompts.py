"""Prompts of the command line, and of a file with one on each line.

A line of a prompts file is a JSON object: one of `prompt`, `prompt_ids` and `messages`, an `id` for
the result, and the settings that differ from the command line's. The whole file is read and checked
before anything else happens; an error names its line.
"""

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from runtime.serving.encoder import GenerationOptions, Prompt
from runtime.serving.sampling import SamplingParams
from runtime.tokenizers.base import PromptError
from runtime.tokenizers.chat import parse_messages

PROMPTS = ("prompt", "prompt_ids", "messages")
SAMPLING = tuple(f.name for f in fields(SamplingParams))  # which checks them
KEYS = (*PROMPTS, "id", "max_new_tokens", *SAMPLING, "stop")
SHOWN = 40  # characters of a wrong value


@dataclass(frozen=True)
class PromptRequest:
    """One prompt, the place it came from, and its own settings by their keys."""

    id: str | int
    where: str
    prompt: Prompt
    settings: Mapping[str, Any] = field(default_factory=dict)

    def options(self, common: GenerationOptions) -> GenerationOptions:
        """The common options, changed by the prompt's own settings. Raises SamplingError."""
        sampling = {key: value for key, value in self.settings.items() if key in SAMPLING}
        others = {key: value for key, value in self.settings.items() if key not in SAMPLING}
        return replace(common, sampling=replace(common.sampling, **sampling), **others)


def text_requests(texts: Sequence[str]) -> list[PromptRequest]:
    return [
        PromptRequest(n, _numbered("--prompt", n, texts), text) for n, text in enumerate(texts, 1)
    ]


def id_requests(lists: Sequence[str]) -> list[PromptRequest]:
    """Prompts from lists like 1,2,3. Raises PromptError."""
    requests = []
    for n, text in enumerate(lists, 1):
        where = _numbered("--prompt-ids", n, lists)
        try:
            requests.append(PromptRequest(n, where, [int(part) for part in text.split(",")]))
        except ValueError as e:
            raise PromptError(f"{where}: expected whole numbers as 1,2,3, got {text!r}") from e
    return requests


def chat_request(path: Path) -> list[PromptRequest]:
    """The chat in a JSON file; `-` is standard input. Raises PromptError."""
    raw, name = _read(path)
    return [PromptRequest(1, name, parse_messages(raw, name))]


def file_requests(path: Path) -> list[PromptRequest]:
    """A prompt from each line that is not empty; `-` is standard input. Raises PromptError."""
    raw, name = _read(path)
    requests: list[PromptRequest] = []
    lines: dict[str | int, str] = {}
    for number, line in enumerate(raw.splitlines(), 1):
        if not line.strip():
            continue
        request = _parse(line, f"{name}: line {number}", len(requests) + 1)
        if request.id in lines:
            raise PromptError(
                f"{request.where}: id: expected one that no other line has, got {request.id!r}, "
                f"which is that of {lines[request.id]}"
            )
        lines[request.id] = f"line {number}"
        requests.append(request)
    if not requests:
        raise PromptError(f"{name}: expected at least one line with a prompt, got none")
    return requests


def _numbered(option: str, n: int, all_given: Sequence[str]) -> str:
    return f"{option} {n}" if len(all_given) > 1 else option


def _read(path: Path) -> tuple[bytes, str]:
    """The file's content, and its name in errors."""
    if str(path) == "-":
        return sys.stdin.buffer.read(), "standard input"
    if not path.is_file():
        raise PromptError(f"{path}: no such file")
    return path.read_bytes(), str(path)


def _parse(line: bytes, where: str, number: int) -> PromptRequest:
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError) as e:
        raise PromptError(f"{where}: expected a JSON object, got no JSON: {e}") from e
    if not isinstance(entry, dict):
        raise PromptError(f"{where}: expected a JSON object, got {_shown(entry)}")
    if unknown := [key for key in entry if key not in KEYS]:
        raise PromptError(f"{where}: expected keys {', '.join(KEYS)}, got {_shown(unknown[0])}")
    prompts = [key for key in PROMPTS if key in entry]
    if len(prompts) != 1:
        raise PromptError(
            f"{where}: expected exactly one of {', '.join(PROMPTS)}, got "
            f"{' and '.join(prompts) or 'none'}"
        )
    values = {key: _checked(f"{where}: {key}", key, value) for key, value in entry.items()}
    prompt, name = values.pop(prompts[0]), values.pop("id", number)
    return PromptRequest(name, where, prompt, values)


def _checked(where: str, key: str, value: Any) -> Any:
    """A key's value. Raises PromptError where its type is wrong."""
    kind = type(value)
    if key == "messages":
        return parse_messages(json.dumps(value).encode(), where)
    if key == "prompt":
        expected, fits = "a string", kind is str
    elif key == "id":
        expected, fits = "a string or a whole number", kind in (str, int)
    elif key == "max_new_tokens":
        expected, fits = "a whole number", kind is int
    elif key == "prompt_ids":
        expected, fits = "a list of whole numbers", _is_list(value, int)
    elif key == "stop":
        expected, fits = "a list of strings", _is_list(value, str)
    else:
        return value
    if not fits:
        raise PromptError(f"{where}: expected {expected}, got {_shown(value)}")
    return value


def _is_list(value: Any, kind: type) -> bool:
    return isinstance(value, list) and all(type(item) is kind for item in value)


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= SHOWN else text[:SHOWN] + "…"
