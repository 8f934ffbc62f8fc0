"""A polite end: SIGTERM and SIGUSR1 ask the run to save and stop."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


class Interruption:
    """Whether this process was asked to stop."""

    def __init__(self) -> None:
        self.asked = False

    def ask(self, _signal: int, _frame: FrameType | None) -> None:
        """The signals' handler."""
        self.asked = True


@contextmanager
def listening() -> Iterator[Interruption]:
    """Take note of the signals, in place of dying of them, while the block runs."""
    interruption = Interruption()
    kept = {number: signal.signal(number, interruption.ask) for number in _SIGNALS}
    try:
        yield interruption
    finally:
        for number, handler in kept.items():
            signal.signal(number, handler)
