"""A request's text as its tokens come: decoded, and ended before a stop string."""

from collections.abc import Sequence

from runtime.serving.request import RequestError
from runtime.serving.stop_strings import StopStrings
from runtime.tokenizers.base import Tokenizer


class TextStream:
    """A request's text; `text` is all that was shown so far, None without a tokenizer."""

    def __init__(self, tokenizer: Tokenizer | None, stop_strings: Sequence[str]) -> None:
        """Raises RequestError where there are stop strings and no tokenizer to find them with."""
        if stop_strings and tokenizer is None:
            raise RequestError("stop strings: expected a tokenizer in the build folder, got none")
        self.text = None if tokenizer is None else ""
        self._decoder = tokenizer.stream() if tokenizer else None
        self._stops = StopStrings(stop_strings)

    def push(self, token: int) -> tuple[str, bool]:
        """The text that appears with a token, and whether a stop string was met."""
        if self._decoder is None or self.text is None:
            return "", False
        shown, stopped = self._stops.push(self._decoder.push(token))
        self.text += shown
        return shown, stopped

    def finish(self) -> str:
        """The text that was held back."""
        if self._decoder is None or self.text is None:
            return ""
        shown, stopped = self._stops.push(self._decoder.finish())
        rest = shown if stopped else shown + self._stops.finish()
        self.text += rest
        return rest
