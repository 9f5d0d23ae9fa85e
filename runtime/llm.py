"""The Python interface: a loaded model that generates, streams and scores.

`LLM` is the usual name for this; an engine, here, is TensorRT's.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from graphs.scoring import WINDOW, Scores
from runtime.devices.base import LoadProgress, no_progress
from runtime.evaluate import evaluate
from runtime.load import load_chain
from runtime.serving.encoder import Encoder, GenerationOptions, Prompt
from runtime.serving.request import Completion, OnUpdate, Request, RequestError, Update
from runtime.serving.scheduler import Scheduler
from runtime.step.chain import Chain


class LLM:
    """A build, ready to run; close it, or use it in a `with`. Not thread-safe."""

    def __init__(self, build: Path, chain: Chain) -> None:
        """Raises BuildError where the stop ids of the build are damaged."""
        self.chain, self.encoder = chain, Encoder(build, chain.config)
        self.scheduler = Scheduler(chain, self.encoder.tokenizer)
        self._open: set[int] = set()  # tickets of calls that have not returned
        self._results: dict[int, Completion] = {}

    @classmethod
    def load(cls, build: str | Path, progress: LoadProgress = no_progress, **options: Any) -> "LLM":
        """Open a build folder; `options` are LoadOptions. Raises as `load_chain`."""
        return cls(Path(build), load_chain(Path(build), progress, **options))

    def __enter__(self) -> "LLM":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Drop what still runs, and save what makes the next start faster."""
        self.scheduler.close()
        self.chain.backend.close()

    def request(self, prompt: Prompt, **options: Any) -> Request:
        """A prompt as the scheduler takes it; `options` are GenerationOptions, here and below.

        Raises as Encoder.request.
        """
        return self.encoder.request(prompt, GenerationOptions(**options))

    def generate(self, prompts: Sequence[Prompt | Request], **options: Any) -> list[Completion]:
        """Run all prompts side by side; returns a result for each, in their order.

        One that failed has an `error`; the others are what they would be without it. Raises as
        `request`, and StepError or CacheError where one could never run; nothing has run then.
        """
        tickets = self._submit(prompts, GenerationOptions(**options))
        try:
            while not all(t in self._results for t in tickets):
                self._step()
            return [self._results.pop(t) for t in tickets]
        finally:
            self._drop(tickets)

    def stream(self, prompt: Prompt | Request, **options: Any) -> Iterator[Update]:
        """Tokens and text as they come. Raises as `generate`, and the error of one that failed.

        Closing the iterator cancels the request.
        """
        updates: deque[Update] = deque()
        tickets = self._submit([prompt], GenerationOptions(**options), updates.append)
        try:
            while tickets[0] not in self._results:
                self._step()
                while updates:
                    yield updates.popleft()
            if error := self._results.pop(tickets[0]).error:
                raise error
        finally:
            self._drop(tickets)

    def score(self, text: str) -> Scores:
        """Score a text, token by token. Raises as `runtime.evaluate`."""
        window = min(WINDOW, self.chain.profile.context)
        return evaluate(self.chain, self.encoder.needed_tokenizer(), text.encode(), window)

    def _submit(
        self,
        prompts: Sequence[Prompt | Request],
        options: GenerationOptions,
        on_update: OnUpdate | None = None,
    ) -> list[int]:
        """Tickets of all requests; where one is refused, none is submitted."""
        if isinstance(prompts, str):
            raise RequestError("prompts: expected a list of prompts, got one text")
        requests = [
            p if isinstance(p, Request) else self.encoder.request(p, options) for p in prompts
        ]
        tickets: list[int] = []
        try:
            for request in requests:
                tickets.append(self.scheduler.submit(request, on_update))
                self._open.add(tickets[-1])
        except BaseException:
            self._drop(tickets)
            raise
        return tickets

    def _drop(self, tickets: Sequence[int]) -> None:
        """End the requests that have not ended, and forget their results."""
        for ticket in tickets:
            self._open.discard(ticket)
            self._results.pop(ticket, None)
            self.scheduler.cancel(ticket)

    def _step(self) -> None:
        ended = self.scheduler.step()
        self._results |= {t: result for t, result in ended.items() if t in self._open}
