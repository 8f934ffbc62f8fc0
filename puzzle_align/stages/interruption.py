"""Stop on request: SIGTERM and SIGUSR1 ask the run to save and stop."""

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
        """Handle a signal."""
        self.asked = True


@contextmanager
def listening() -> Iterator[Interruption]:
    """Record the signals while the block runs, instead of ending the process."""
    interruption = Interruption()
    kept = {number: signal.signal(number, interruption.ask) for number in _SIGNALS}
    try:
        yield interruption
    finally:
        for number, handler in kept.items():
            signal.signal(number, handler)
