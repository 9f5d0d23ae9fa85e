"""SIGINT and SIGTERM: how a command is stopped from outside, with no traceback."""

import signal
from types import FrameType, TracebackType

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupted(BaseException):
    """Raised where the main thread stands when a signal comes; no `except Exception` holds it."""


class Interruption:
    """For a `with` in the main thread: a signal ends the block, and `received` says which.

    At once; or, while it is `patient`, only the second one does: the first is there in `received`
    for the block to look at where it can stop. Signals that were ignored before stay ignored.
    Behind a block that a signal ended, a further one kills the process, which is about to end.
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

    def _receive(self, number: int, frame: FrameType | None) -> None:
        noted = self.patient and self.received is None
        self.received = signal.Signals(number)
        if not noted:
            raise Interrupted


def without_traceback() -> None:
    """Let SIGINT, where nothing handles it, end the process as SIGTERM does."""
    if signal.getsignal(signal.SIGINT) == signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
