"""Activity of this process's main thread: its name, its progress, and waits for other ranks.

The watch's thread (``liveness.watch``) reads it, to report a failed rank's activity and to
distinguish a rank that hangs from ranks that wait for it.
"""

import mmap
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

ACTIVITY_BYTES = 256


class ActivityMarks:
    """Activity of one process, which only its main thread sets."""

    def __init__(self) -> None:
        self.activity = ""
        self.count = 0  # grows with every activity, progress mark and end of a wait
        self.is_waiting = False
        self.num_unhurried = 0  # open blocks of ``unhurried``
        self._memory: mmap.mmap | None = None

    def share(self, memory: mmap.mmap | None) -> None:
        """Keep the activity in shared ``memory``, which outlives this process."""
        self._memory = memory
        self.begin(self.activity)

    def begin(self, what: str) -> None:
        """Set this rank's activity from here on."""
        self.activity = what
        self.count += 1
        if self._memory is not None:
            self._memory[:] = what.encode()[:ACTIVITY_BYTES].ljust(ACTIVITY_BYTES, b"\0")

    def went_on(self) -> None:
        """Note progress in long work, such as a block read or written."""
        self.count += 1


this_rank = ActivityMarks()


@contextmanager
def activity(what: str) -> Iterator[None]:
    """Name the block's work, for the report if this rank fails, dies or hangs in it.

    An exception from the block gets the note ``in WHAT``.
    """
    outer = this_rank.activity
    this_rank.begin(what)
    try:
        yield
    except Exception as error:
        error.add_note(f"in {what}")
        raise
    this_rank.begin(outer)  # not after an error: the report needs the failed activity


@contextmanager
def waiting() -> Iterator[None]:
    """Mark the block as a wait for other ranks, which are blamed if it takes too long."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    outer, this_rank.is_waiting = this_rank.is_waiting, True
    try:
        yield
    finally:
        this_rank.is_waiting = outer
        this_rank.count += 1


@contextmanager
def unhurried() -> Iterator[None]:
    """Exempt the block from the watch's time-out: it has a separate one, or needs none."""
    this_rank.num_unhurried += 1
    try:
        yield
    finally:
        this_rank.num_unhurried -= 1
        this_rank.count += 1


@cache  # once a process
def note_waits() -> None:
    """Mark every wait for a collective or transfer of torch, Megatron or this package.

    All of them call ``Work.wait``, which this replaces.
    """
    import torch.distributed as dist  # not above: the command line imports this without torch

    wait = dist.Work.wait

    def noted(self: dist.Work, *args: Any, **named: Any) -> bool:
        with waiting():
            return wait(self, *args, **named)

    dist.Work.wait = noted
