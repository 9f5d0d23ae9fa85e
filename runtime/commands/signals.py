"""SIGINT and SIGTERM stop a command with no traceback."""

import signal
import sys
from types import FrameType, TracebackType
from typing import NoReturn

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupted(BaseException):
    """Raised in the main thread when a signal comes; no `except Exception` catches it."""


class Interruption:
    """A context manager of the main thread: a signal ends the block, and `received` says which.

    The first one ends it at once, or, while it is `patient`, the second one: the block then looks
    for the first in `received` where it can stop. Signals that were ignored before stay ignored.
    After a block that a signal ended, a further one kills the process, which is about to end.
    """

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self.patient = False
        self._before: dict[signal.Signals, signal._HANDLER] = {}

    def __enter__(self) -> "Interruption":
        for number in SIGNALS:
            if signal.getsignal(number) != signal.SIG_IGN:
                self._before[number] = signal.signal(number, self._receive)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool:
        for number, handler in self._before.items():
            signal.signal(number, signal.SIG_DFL if self.received else handler)
        return kind is Interrupted

    @property
    def status(self) -> int:
        """A shell's exit status for what a signal ended: 130 for SIGINT, 143 for SIGTERM."""
        assert self.received is not None
        return 128 + self.received

    def leave(self, done: str = "") -> NoReturn:
        """Say that a signal ended the command, and exit."""
        print(f"interrupted{done}", file=sys.stderr)
        sys.exit(self.status)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        noted = self.patient and self.received is None
        self.received = signal.Signals(number)
        if not noted:
            raise Interrupted


def without_traceback() -> None:
    """Let SIGINT, where nothing handles it, end the process as SIGTERM does."""
    if signal.getsignal(signal.SIGINT) == signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
