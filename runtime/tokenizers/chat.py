"""Messages to token ids, in the form of Kimi's published chat template.

A turn is `<|im_ROLE|>ROLE<|im_middle|>CONTENT<|im_end|>`. Turns follow each other with nothing in
between, no BOS stands before them, and the model continues from
`<|im_assistant|>assistant<|im_middle|>` at the end. The tokens between the words are put in by id
and content is encoded as ordinary text: no message can end its turn or open another.

Thinking models, whose template names `<think>`, have an empty `<think></think>` before each answer
of the history, as their templates give answers without their reasoning (K2-Thinking). Where the
template also opens `<think>` for the model, its thinking switched on by default, so does this
(K2.5, K2.6).

The templates add a system message where the first message is none; its words differ between
releases, and none is added here: write one where it is wanted. Tools, tool calls, names and images
are refused.
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
        entries = json.loads(raw)
    except (ValueError, RecursionError) as e:
        raise PromptError(f"{source}: expected a JSON list of messages, got no JSON: {e}") from e
    if not isinstance(entries, list) or not entries:
        raise PromptError(
            f"{source}: expected a JSON list of at least one message, got "
            f"{'an empty list' if entries == [] else type(entries).__name__}"
        )
    return [_message(f"{source}: message {index}", entry) for index, entry in enumerate(entries)]


def _message(where: str, entry: object) -> Message:
    if not isinstance(entry, dict):
        raise PromptError(
            f"{where}: expected an object with role and content, got {type(entry).__name__}"
        )
    for key in ("role", "content"):
        if key not in entry:
            raise PromptError(f"{where}: expected {key}, got {', '.join(entry) or 'nothing'}")
    if unknown := [key for key in entry if key not in ("role", "content")]:
        raise PromptError(
            f"{where}: expected only role and content, got {unknown[0]}; names, tools and tool "
            "calls are not supported"
        )
    role, content = entry["role"], entry["content"]
    if role not in ROLES:
        raise PromptError(f"{where}: role: expected {', '.join(ROLES)}, got {role!r}")
    if not isinstance(content, str):
        raise PromptError(f"{where}: content: expected a string, got {type(content).__name__}")
    return Message(role, content)


@dataclass(frozen=True)
class Chat:
    """The form of chats with a build's model."""

    tokenizer: Tokenizer
    thinks: bool  # answers of the history carry an empty <think></think>
    opens_thinking: bool  # the prompt ends in <think>

    @classmethod
    def open(cls, build: Path, tokenizer: Tokenizer) -> Self:
        """Raises BuildError where the tokenizer lacks role tokens, or their use is unknown."""
        template = _template(build / "tokenizer")
        names = [*(_opening(role) for role in ROLES), MIDDLE, END]
        thinks = template is not None and THINK in template
        if thinks:
            names += [THINK, UNTHINK]
        if missing := [name for name in names if name not in tokenizer.special]:
            raise BuildError(
                f"{build}: --messages: expected a tokenizer with Kimi's role tokens, got one "
                f"without {', '.join(missing)}; give --prompt or --prompt-ids"
            )
        if template is None and THINK in tokenizer.special:
            raise BuildError(
                f"{build / 'tokenizer'}: expected chat_template.jinja, or chat_template in "
                f"tokenizer_config.json, got neither; the tokenizer has {THINK}, and only the "
                "template says where it stands in a chat"
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
    """The model's chat template: it is searched for words, never run."""
    path, settings = folder / "chat_template.jinja", folder / "tokenizer_config.json"
    if path.is_file():
        return path.read_text(encoding="utf-8", errors="replace")
    template = read_object(settings).get("chat_template") if settings.is_file() else None
    if template is not None and not isinstance(template, str):
        raise BuildError(
            f"{settings}: chat_template: expected a string, got {type(template).__name__}"
        )
    return template
