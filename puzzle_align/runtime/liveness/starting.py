"""Reports of a rank's death while the job starts, before the ranks have met.

torchrun ends the other ranks of its machine with SIGTERM as soon as one has died, and a starting
rank would end without a message. So from its first moment a rank observes the processes that
torchrun started beside it, and a thread answers the signal:
- before the ranks have met it says in one line which of them was killed, and ends;
- afterwards it lets the watch report (``liveness.watch``), and ends if the watch has seen no death;
- it reports no rank that ended by itself, which has said why;
- a handler of SIGTERM installed later (by the training loop, to save and stop) replaces it.
"""

import os
import select
import signal
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from puzzle_align.runtime.liveness import watch
from puzzle_align.runtime.liveness.launcher import error_file, has_agent, tell_launcher, write_line
from puzzle_align.runtime.liveness.neighbours import how_it_ended, siblings

_LOOK_S = 0.2  # between two searches for processes that torchrun is still starting
_REPORT_S = 2.0  # the watch notices a death within it
_ENDED = 128 + signal.SIGTERM


@dataclass
class _Sibling:
    """A rank's process on this machine, as torchrun started it."""

    rank: int
    process: int
    error_file: str | None
    ending: str = ""  # empty while it lives

    @property
    def was_killed(self) -> bool:
        """Whether it died without a message: a process that ends by itself says why."""
        if not self.ending or self.ending.startswith("ended"):
            return False
        return self.error_file is None or not Path(self.error_file).exists()


def _take_note(_signal: int, _frame: FrameType | None) -> None:
    """Handle SIGTERM by doing nothing: the wake-up descriptor notifies the thread."""


class _Start:
    """Thread that answers SIGTERM, and the processes that it observes."""

    def __init__(self, rank: int, num_siblings: int) -> None:
        self._rank, self._num_siblings = rank, num_siblings
        self._siblings: dict[int, _Sibling] = {}  # by rank
        self._alive: dict[int, _Sibling] = {}  # by the descriptor of the process
        self._signals, wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.signal(signal.SIGTERM, _take_note)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        os.register_at_fork(after_in_child=_forget)
        threading.Thread(target=self._run, name="start", daemon=True).start()

    def _run(self) -> None:
        while True:
            if len(self._siblings) < self._num_siblings and not _has_met():
                self._find_siblings()
            if self._look() and signal.getsignal(signal.SIGTERM) is _take_note:
                self._end()

    def _find_siblings(self) -> None:
        for rank, (process, file) in siblings().items():
            if rank == self._rank or rank in self._siblings:
                continue
            with suppress(ProcessLookupError):
                sibling = _Sibling(rank, process, file)
                self._alive[os.pidfd_open(process)] = self._siblings[rank] = sibling

    def _look(self) -> bool:
        """Wait a while, note the siblings that ended, and return whether SIGTERM came."""
        poll = select.poll()
        for descriptor in (*self._alive, self._signals):
            poll.register(descriptor, select.POLLIN)
        is_asked = False
        for descriptor, _ in poll.poll(1000 * _LOOK_S):
            if descriptor == self._signals:
                is_asked = signal.SIGTERM in os.read(self._signals, 4096)
            else:
                sibling = self._alive.pop(descriptor)
                sibling.ending = how_it_ended(sibling.process)
                os.close(descriptor)
        return is_asked

    def _end(self) -> None:
        """End this process, and say which rank was killed."""
        line = f"rank {self._rank} was asked to end while it started"
        if _has_met():
            self._leave_to_watch()
        else:
            self._look()  # a death that came together with the signal
            killed = next((one for one in self._siblings.values() if one.was_killed), None)
            if killed is not None:
                who = f"rank {killed.rank} (process {killed.process})"
                line = f"rank {self._rank} stopped while it started, because {who} {killed.ending}"
                write_line(line)
        tell_launcher(line, error_file())
        os._exit(_ENDED)

    def _leave_to_watch(self) -> None:
        """Give the watch time to report a death and end this process; else return silently."""
        seen = watch.current()
        time.sleep(_REPORT_S)
        while seen is not None and seen.has_seen_death:
            time.sleep(_LOOK_S)
        if seen is not None and seen.claim_report():
            seen.reported("")


def _has_met() -> bool:
    seen = watch.current()
    return seen is not None and seen.has_met


def _forget() -> None:
    """In a forked process, restore SIGTERM's default, and stop waking the parent's thread."""
    if signal.getsignal(signal.SIGTERM) is _take_note:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.set_wakeup_fd(-1)


def watch_start() -> None:
    """Answer SIGTERM from here on, if torchrun's agent started this process and others."""
    num_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if has_agent() and int(os.environ["WORLD_SIZE"]) > 1:
        _Start(int(os.environ["RANK"]), num_ranks - 1)
