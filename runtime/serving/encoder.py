"""Makes a request of a prompt: its token ids, and the ids that end the result."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from graphs.contract.config import ModelConfig
from graphs.contract.spec import BuildError
from runtime.serving.request import Request, RequestError
from runtime.serving.sampling import SamplingParams
from runtime.serving.stop_ids import stop_ids
from runtime.tokenizers.base import Tokenizer
from runtime.tokenizers.chat import Chat, Message
from runtime.tokenizers.load import load_tokenizer

# Text, token ids, or a chat for the model to answer.
Prompt = str | Sequence[int] | Sequence[Message]


@dataclass(frozen=True)
class GenerationOptions:
    """Settings of a prompt's continuation. Raises RequestError where `stop` is a lone string."""

    max_new_tokens: int = Request.max_new_tokens
    sampling: SamplingParams = field(default_factory=SamplingParams)
    stop: Sequence[str] = ()  # strings that end the text

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            raise RequestError("stop: expected a list of strings, got one string")


class Encoder:
    """A build's tokenizer and stop ids; `no_tokenizer` says why there is none.

    Token ids can be run without one.
    """

    def __init__(self, build: Path, config: ModelConfig) -> None:
        """Raises BuildError where the stop ids of the build are damaged."""
        self.build = build
        self.stop_ids = stop_ids(build, config)
        self.tokenizer: Tokenizer | None = None
        self.no_tokenizer: BuildError | None = None
        try:
            self.tokenizer = load_tokenizer(build, config)
        except BuildError as e:
            self.no_tokenizer = e

    def request(self, prompt: Prompt, options: GenerationOptions) -> Request:
        """A prompt as the scheduler takes it.

        Raises PromptError or RequestError, and BuildError where it needs a tokenizer, or the role
        tokens of a chat, and the build has none.
        """
        ids, stops = self._ids(prompt)
        return Request(ids, options.max_new_tokens, options.sampling, stops, tuple(options.stop))

    def needed_tokenizer(self) -> Tokenizer:
        """Raises BuildError where there is none."""
        if self.tokenizer is None:
            assert self.no_tokenizer is not None
            raise self.no_tokenizer
        return self.tokenizer

    @cached_property
    def chat(self) -> Chat:
        """Raises BuildError."""
        return Chat.open(self.build, self.needed_tokenizer())

    def _ids(self, prompt: Prompt) -> tuple[tuple[int, ...], frozenset[int]]:
        """A prompt's ids, and those that end what follows it."""
        if isinstance(prompt, str):
            return tuple(self.needed_tokenizer().encode(prompt)), self.stop_ids
        messages = [item for item in prompt if isinstance(item, Message)]
        if messages and len(messages) == len(prompt):
            return tuple(self.chat.ids(messages)), self.stop_ids | {self.chat.end}
        ids = tuple(item for item in prompt if isinstance(item, int))
        if len(ids) != len(prompt):
            raise RequestError("prompt: expected text, token ids or messages, got a mixture")
        return ids, self.stop_ids
