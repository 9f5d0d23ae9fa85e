"""Ends a text before the first stop string that becomes whole in it."""

from collections.abc import Sequence

from runtime.serving.sampling import SamplingError


class StopStrings:
    """Takes a text in pieces and returns what may be shown of it.

    The stop string that is whole first ends the text; of two whole at the same character, the
    longer one. Neither depends on how the text was cut. Only text that a stop string may begin with
    is held back.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        """Raises SamplingError where one is empty, or a string is given in place of a list."""
        wrong = [stops] if isinstance(stops, str) else [s for s in stops if not _is_stop(s)]
        if wrong:
            raise SamplingError(
                f"stop strings: expected a list of strings that are not empty, got {wrong[0]!r}"
            )
        self._stops = tuple(stops)
        self._longest = max(map(len, self._stops), default=0)
        self._held = ""
        self._stopped = False

    def push(self, piece: str) -> tuple[str, bool]:
        """The text that may be shown now, and whether a stop string was met; then no more text."""
        if self._stopped:
            return "", True
        text, self._held = self._held + piece, ""
        spans = [(at + len(s), at) for s in self._stops if (at := text.find(s)) >= 0]
        if spans:
            self._stopped = True
            return text[: min(spans)[1]], True
        shown = len(text) - self._pending(text)
        self._held = text[shown:]
        return text[:shown], False

    def finish(self) -> str:
        """The text that was held back, where the text ended without a stop string."""
        held, self._held = self._held, ""
        return held

    def _pending(self, text: str) -> int:
        """The most characters at the end of a text that a stop string begins with."""
        for length in range(min(self._longest - 1, len(text)), 0, -1):
            end = text[-length:]
            if any(stop.startswith(end) for stop in self._stops):
                return length
        return 0


def _is_stop(stop: object) -> bool:
    return isinstance(stop, str) and stop != ""
