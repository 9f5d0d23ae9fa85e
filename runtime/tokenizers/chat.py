"""Messages to token ids, in the form of Kimi's published chat template.

A turn is `<|im_ROLE|>ROLE<|im_middle|>CONTENT<|im_end|>`. Turns follow each other with nothing in
between, no BOS stands before them, and `<|im_assistant|>assistant<|im_middle|>` at the end is for
the model to go on from. The tokens between the words are put in by id and content is encoded as
ordinary text: nothing that a message says can end its turn or open another.

Thinking models, whose template names `<think>`, have an empty `<think></think>` before each answer
of the history, as their templates give answers without their reasoning (K2-Thinking). Where the
template also opens `<think>` for the model, its thinking switched on by default, so does this
(K2.5, K2.6).

The templates add a system message where the first message is none; its words differ between
releases, and none is added here: who wants one writes it. Tools, tool calls, names and images are
refused.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Self, get_args

from graphs.contract.spec import BuildError
from runtime.tokenizers.base import PromptError, Tokenizer
from runtime.tokenizers.build_json import read_object

Role = Literal["system", "user", "assistant"]
ROLES: tuple[Role, ...] = get_args(Role)
MIDDLE, END = "<|im_middle|>", "<|im_end|>"
THINK, UNTHINK = "<think>", "</think>"


@dataclass(frozen=True)
class Message:
    role: Role
    content: str


def parse_messages(raw: bytes, source: str) -> list[Message]:
    """A JSON list of {"role", "content"}; `source` names it in errors. Raises PromptError."""
    try:
        found = json.loads(raw)
    except (ValueError, RecursionError) as e:
        raise PromptError(f"{source}: a JSON list of messages expected, no JSON found: {e}") from e
    if not isinstance(found, list) or not found:
        raise PromptError(
            f"{source}: a JSON list of at least one message expected, found "
            f"{'an empty list' if found == [] else type(found).__name__}"
        )
    return [_message(f"{source}: message {index}", entry) for index, entry in enumerate(found)]


def _message(where: str, entry: object) -> Message:
    if not isinstance(entry, dict):
        raise PromptError(
            f"{where}: an object with role and content expected, found {type(entry).__name__}"
        )
    for key in ("role", "content"):
        if key not in entry:
            raise PromptError(f"{where}: {key} expected, found {', '.join(entry) or 'nothing'}")
    if unknown := [key for key in entry if key not in ("role", "content")]:
        raise PromptError(
            f"{where}: role and content only expected, found {unknown[0]}; names, tools and tool "
            "calls are not supported"
        )
    role, content = entry["role"], entry["content"]
    if role not in ROLES:
        raise PromptError(f"{where}: role: {', '.join(ROLES)} expected, found {role!r}")
    if not isinstance(content, str):
        raise PromptError(f"{where}: content: a string expected, found {type(content).__name__}")
    return Message(role, content)


@dataclass(frozen=True)
class Chat:
    """How a build's model is talked to."""

    tokenizer: Tokenizer
    thinks: bool  # answers of the history carry an empty <think></think>
    opens_thinking: bool  # the prompt ends in <think>

    @classmethod
    def open(cls, build: Path, tokenizer: Tokenizer) -> Self:
        """Raises BuildError where the model has no role tokens, or none of this form."""
        template = _template(build / "tokenizer")
        wanted = [*(_opening(role) for role in ROLES), MIDDLE, END]
        thinks = template is not None and THINK in template
        if thinks:
            wanted += [THINK, UNTHINK]
        if missing := [name for name in wanted if name not in tokenizer.special]:
            raise BuildError(
                f"{build}: --messages needs Kimi's role tokens: {', '.join(wanted)} expected in "
                f"the tokenizer, {', '.join(missing)} not found; give --prompt or --prompt-ids"
            )
        if template is None and THINK in tokenizer.special:
            raise BuildError(
                f"{build / 'tokenizer'}: chat_template.jinja, or chat_template in "
                f"tokenizer_config.json, expected, since a tokenizer with {THINK} leaves open "
                "where it stands in a chat, found neither"
            )
        generation = (template or "").rpartition("add_generation_prompt")[2]
        return cls(tokenizer, thinks, thinks and THINK in generation)

    @property
    def end(self) -> int:
        """The id that ends the model's turn."""
        return self.tokenizer.special[END]

    def ids(self, messages: Sequence[Message]) -> list[int]:
        """The prompt's ids, up to where the assistant's next turn begins. Raises PromptError."""
        special = self.tokenizer.special
        ids: list[int] = []
        for index, message in enumerate(messages):
            ids += self._header(message.role)
            if self.thinks and message.role == "assistant":
                ids += [special[THINK], special[UNTHINK]]
            try:
                ids += self.tokenizer.ordinary(message.content)
            except PromptError as e:
                raise PromptError(f"message {index}: content: {e}") from e
            ids.append(special[END])
        ids += self._header("assistant")
        return [*ids, special[THINK]] if self.opens_thinking else ids

    def _header(self, role: Role) -> list[int]:
        special = self.tokenizer.special
        return [special[_opening(role)], *self.tokenizer.ordinary(role), special[MIDDLE]]


def _opening(role: Role) -> str:
    return f"<|im_{role}|>"


def _template(folder: Path) -> str | None:
    """The model's own chat template, which is read for the words it uses, never run."""
    path, settings = folder / "chat_template.jinja", folder / "tokenizer_config.json"
    if path.is_file():
        return path.read_text(encoding="utf-8", errors="replace")
    template = read_object(settings).get("chat_template") if settings.is_file() else None
    if template is not None and not isinstance(template, str):
        raise BuildError(
            f"{settings}: chat_template: a string expected, found {type(template).__name__}"
        )
    return template
