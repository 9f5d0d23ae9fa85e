"""A request of a model, and its result."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from runtime.serving.sampling import SamplingParams

FinishReason = Literal["stop", "length", "cancelled", "error"]


class RequestError(ValueError):
    """A request that cannot be served; says what was expected."""


@dataclass(frozen=True)
class Request:
    """A prompt, and how it is continued.

    The text ends after a token of `stop_ids` (which is the last of the result's tokens), before one
    of `stop_strings` (which is left out of its text), or after `max_new_tokens`.
    """

    prompt: tuple[int, ...]
    max_new_tokens: int = 128
    sampling: SamplingParams = field(default_factory=SamplingParams)
    stop_ids: frozenset[int] = frozenset()
    stop_strings: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Raises RequestError."""
        if not self.prompt:
            raise RequestError("prompt: expected at least one token, got none")
        if self.max_new_tokens < 1:
            raise RequestError(f"max_new_tokens: expected at least 1, got {self.max_new_tokens}")

    @property
    def final_rows(self) -> int:
        """Cache rows when its last token has been chosen: that token's is never computed."""
        return len(self.prompt) + self.max_new_tokens - 1


@dataclass(frozen=True)
class Update:
    """A new token, and the text that appears with it.

    Text is held back while a character or a stop string may still become whole, at most until the
    last token.
    """

    token: int
    text: str


OnUpdate = Callable[[Update], None]


@dataclass(frozen=True)
class Completion:
    """A request's result. `text` is None without a tokenizer; `error` is set for reason "error".

    `reused` counts the rows of the prompt that were in the cache already.
    """

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    text: str | None
    reason: FinishReason
    reused: int = 0
    error: Exception | None = None
