"""Work for processes of ``data.workers``."""

import os
import signal
import time


def slow_double(value: int) -> int:
    """Neighbours take different times."""
    time.sleep(0.005 * (value % 3))
    return 2 * value


def killed_at_two(value: int) -> int:
    """Ended from without, as by a system that has no memory left."""
    if value == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    return value


def broken_at_two(value: int) -> int:
    """A ValueError that is not this package's."""
    return int("x") if value == 2 else value


def endless_but_the_first(number: int) -> int:
    """Far longer than a test waits, for every item but the first."""
    if number:
        time.sleep(60)
    return number
