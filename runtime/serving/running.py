"""A request that was submitted: the ids that are still to be run, its tokens, and its end."""

from dataclasses import dataclass, field

from graphs.contract.tensorfile import Array
from runtime.serving.request import Completion, FinishReason, OnUpdate, Request, Update
from runtime.serving.sampling import Sampler, SamplingError
from runtime.serving.text import TextStream


class CallbackError(RuntimeError):
    """A callback of the caller raised; chained to what it raised."""


@dataclass
class RunningRequest:
    """A submitted request; `pending` are the ids still to be run: the prompt's, then the newest."""

    ticket: int
    request: Request
    sampler: Sampler
    stream: TextStream
    on_update: OnUpdate | None
    pending: list[int]
    handle: int = 0  # of its sequence in the cache, once it was admitted
    reused: int = 0  # rows of the prompt that the cache had
    served: int = 0  # the number of the step that served it last
    tokens: list[int] = field(default_factory=list)
    ended: FinishReason | None = None
    error: Exception | None = None

    def end(self, reason: FinishReason, error: Exception | None = None) -> None:
        """End the request; the first reason stands, except that an error replaces it."""
        if self.ended is None or error is not None:
            self.ended, self.error = reason, error

    def advance(self, count: int, logits: Array) -> None:
        """Drop `count` pending ids that were run; after the last of them, choose the next token."""
        del self.pending[:count]
        if self.pending or self.ended:
            return
        try:
            token = self.sampler(logits)
        except SamplingError as e:
            self.end("error", e)
            return
        self.tokens.append(token)
        self.pending = [token]
        text, stopped = self.stream.push(token)
        if stopped or token in self.request.stop_ids:
            self.end("stop")
        elif len(self.tokens) == self.request.max_new_tokens:
            self.end("length")
        if self.ended:
            text += self.stream.finish()
        self._notify(Update(token, text))

    def completion(self) -> Completion:
        assert self.ended is not None
        request, tokens = self.request, tuple(self.tokens)
        return Completion(
            request.prompt, tokens, self.stream.text, self.ended, self.reused, self.error
        )

    def _notify(self, update: Update) -> None:
        if self.on_update is None:
            return
        try:
            self.on_update(update)
        except Exception as e:
            error = CallbackError(f"on_update raised {type(e).__name__}: {e}")
            error.__cause__ = e
            self.end("error", error)
