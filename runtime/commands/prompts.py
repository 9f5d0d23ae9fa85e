"""What the command line is asked to go on from: its own prompts, or a file's, one a line.

A line of a prompts file is a JSON object: one of `prompt`, `prompt_ids` and `messages`, an `id` to
know the result by, and those settings in which it differs from the command line's. All of a file is
read and checked before anything else happens, and what is wrong is said with its line.
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
    """One prompt, where it was found, and its own settings by their keys."""

    id: str | int
    where: str
    prompt: Prompt
    settings: Mapping[str, Any] = field(default_factory=dict)

    def options(self, common: GenerationOptions) -> GenerationOptions:
        """The common ones with its own in their place. Raises SamplingError."""
        own = dict(self.settings)
        options = common.copy()
        if "max_new_tokens" in own:
            options["max_new_tokens"] = own.pop("max_new_tokens")
        if "stop" in own:
            options["stop"] = own.pop("stop")
        options["sampling"] = replace(common.get("sampling", SamplingParams()), **own)
        return options


def given_texts(texts: Sequence[str]) -> list[PromptRequest]:
    return [
        PromptRequest(n, _numbered("--prompt", n, texts), text) for n, text in enumerate(texts, 1)
    ]


def given_ids(lists: Sequence[str]) -> list[PromptRequest]:
    """Of lists like 1,2,3. Raises PromptError."""
    asked = []
    for n, text in enumerate(lists, 1):
        where = _numbered("--prompt-ids", n, lists)
        try:
            asked.append(PromptRequest(n, where, [int(part) for part in text.split(",")]))
        except ValueError as e:
            raise PromptError(f"{where}: whole numbers as 1,2,3 expected, found {text!r}") from e
    return asked


def given_messages(path: Path) -> list[PromptRequest]:
    """One chat of a JSON file, `-`: of standard input. Raises PromptError."""
    raw, name = _read(path)
    return [PromptRequest(1, name, parse_messages(raw, name))]


def given_file(path: Path) -> list[PromptRequest]:
    """A prompt a line; `-`: of standard input. Empty lines are skipped. Raises PromptError."""
    raw, name = _read(path)
    asked: list[PromptRequest] = []
    lines: dict[str | int, str] = {}
    for number, line in enumerate(raw.splitlines(), 1):
        if not line.strip():
            continue
        found = _parse(line, f"{name}: line {number}", len(asked) + 1)
        if found.id in lines:
            raise PromptError(
                f"{found.where}: id: one of its own expected, found {found.id!r}, which is that of "
                f"{lines[found.id]}"
            )
        lines[found.id] = f"line {number}"
        asked.append(found)
    if not asked:
        raise PromptError(f"{name}: at least one line with a prompt expected, found none")
    return asked


def _numbered(option: str, n: int, all_given: Sequence[str]) -> str:
    return f"{option} {n}" if len(all_given) > 1 else option


def _read(path: Path) -> tuple[bytes, str]:
    """The file's content, and what to call it in errors."""
    if str(path) == "-":
        return sys.stdin.buffer.read(), "standard input"
    if not path.is_file():
        raise PromptError(f"{path}: no such file")
    return path.read_bytes(), str(path)


def _parse(line: bytes, where: str, number: int) -> PromptRequest:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError) as e:
        raise PromptError(f"{where}: a JSON object expected, no JSON found: {e}") from e
    if not isinstance(found, dict):
        raise PromptError(f"{where}: a JSON object expected, found {_shown(found)}")
    if unknown := [key for key in found if key not in KEYS]:
        raise PromptError(f"{where}: keys {', '.join(KEYS)} expected, found {_shown(unknown[0])}")
    prompts = [key for key in PROMPTS if key in found]
    if len(prompts) != 1:
        raise PromptError(
            f"{where}: exactly one of {', '.join(PROMPTS)} expected, found "
            f"{' and '.join(prompts) or 'none'}"
        )
    values = {key: _checked(f"{where}: {key}", key, value) for key, value in found.items()}
    prompt, name = values.pop(prompts[0]), values.pop("id", number)
    return PromptRequest(name, where, prompt, values)


def _checked(where: str, key: str, value: Any) -> Any:
    """A key's value, as it is used. Raises PromptError where its type is wrong."""
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
        raise PromptError(f"{where}: {expected} expected, found {_shown(value)}")
    return value


def _is_list(value: Any, kind: type) -> bool:
    return isinstance(value, list) and all(type(item) is kind for item in value)


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= SHOWN else text[:SHOWN] + "…"
