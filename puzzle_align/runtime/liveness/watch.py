"""Ranks watch one another: a job with a dead rank ends within seconds and says which rank died.

A rank that waits for a dead one in a collective would wait until the process group's time-out (NCCL
reports nothing), and would only note the launcher's SIGTERM, to save after the step. So every rank
has a thread that the kernel wakes when another rank's process on its machine ends, and that checks
in the launcher's store every second whether the job has failed elsewhere.

The thread also notices, within the job's time-out, a rank that is alive but makes no progress:
- a stopped process: every rank sends heartbeats to the store, and the rank before it checks them;
- a hanging main thread: others wait for it (in any group), and it waits for nobody. A rank that
  waits is never blamed, however long, nor is one that makes progress, however slow.

Invariants:
- one failure is reported in full, by the first rank that claims the report in the launcher's store;
  every other rank then reports its activity in one line, and ends;
- a rank on the same machine reports for a killed or stopped one, whose activity it reads from
  shared memory;
- a rank that has left the job (``unwatch``) may end in any way;
- a machine that was suspended as a whole continues: only time in which a thread ran counts.
"""

import mmap
import os
import select
import signal
import sys
import threading
import time
import traceback
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from puzzle_align.runtime.liveness.activity import ACTIVITY_BYTES, note_waits, this_rank
from puzzle_align.runtime.liveness.launcher import error_file, has_agent, tell_launcher, write_line
from puzzle_align.runtime.liveness.neighbours import (
    Card,
    Neighbour,
    neighbours,
    own_card,
    siblings,
    state,
)

if TYPE_CHECKING:
    import torch
    from torch.distributed import Store

_POLL_S = 1.0  # until a failure on another machine is noticed
_SOON_S = 0.02  # between checks for a report that is about to come
_REPORT_S = 3.0  # wait for another rank's report before ending
_END_S = 1.0  # between the first failure and other ranks' end: the launcher sees them in that order
_LATER_S = 15.0  # from the watch's time-out, which names the culprit, to the process groups'


class Watch:
    """Thread that observes the other ranks, and reports the job's first failure."""

    def __init__(self, rank: int, size: int, timeout_s: float, device: "torch.device") -> None:
        """Start sending heartbeats and checking the next rank's; call ``meet`` afterwards.

        Args:
            timeout_s: how long a rank may be stopped, or keep others waiting.
        """
        import torch.distributed as dist  # not above: the command line imports this without torch

        self.own_error = ""
        self._rank, self._size = rank, size
        self._next = (rank + 1) % size
        self._timeout_s, self._device = timeout_s, device
        self._over = False
        self._death: tuple[str, float] | None = None  # a failure, and when to stop waiting
        self.has_met = False
        self.has_seen_death = False
        self._wake = os.eventfd(0)
        self._memory = os.memfd_create("activity")
        os.ftruncate(self._memory, ACTIVITY_BYTES)
        this_rank.share(mmap.mmap(self._memory, ACTIVITY_BYTES))
        note_waits()
        self._cards: list[Card] = []
        self._beside: dict[int, Neighbour] = {}  # by the descriptor of the process
        # A separate connection: waiting for a key in the process group's would block this thread.
        self._server = dist.TCPStore(
            os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), wait_for_workers=False
        )
        start = (os.environ.get(f"TORCHELASTIC_{name}", "") for name in ("RUN_ID", "RESTART_COUNT"))
        self._beats: Store = dist.PrefixStore("/".join(("beats", *start)), self._server)
        self._heard, self._silent_s = 0, 0.0  # the next rank's heartbeats
        self._count, self._still_s = -1, 0.0  # progress of this rank's main thread
        self._waits: int | None = None  # all ranks' announced waits, since this rank stalls
        self._store: Store | None = None  # of this start of the job
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)
        self._thread.start()

    def meet(self) -> None:
        """Exchange cards with the other ranks. Collective over the world."""
        import torch.distributed as dist

        cards: list[Any] = [None] * self._size
        dist.all_gather_object(cards, own_card(self._memory))
        self._cards = cards
        self._beside = {beside.process: beside for beside in neighbours(self._rank, cards)}
        self._store = dist.PrefixStore(f"watch/{cards[0].job}", self._server)
        self.has_met = True
        os.eventfd_write(self._wake, 1)

    def claim_report(self) -> bool:
        """Claim the report of the first failure; True: call ``reported``, then end by yourself."""
        self._over = self._is_first()
        return self._over

    def reported(self, failure: str) -> None:
        """Let the other ranks end, giving ``failure`` as the reason; silently if it is empty."""
        if self._store is None:
            return
        with suppress(RuntimeError):  # the store is gone
            self._store.set("reported", failure)
        if len(self._beside) + 1 < self._size:
            time.sleep(2 * _POLL_S)  # the launcher may take the store with it: let others ask first

    def close(self) -> None:
        """Leave the job: other ranks do not report this process's end from here on."""
        if self._store is not None:
            with suppress(RuntimeError):  # the store is gone
                self._store.set(f"left/{self._rank}", "")
        self._over = True
        os.eventfd_write(self._wake, 1)
        self._thread.join()
        this_rank.share(None)

    def _run(self) -> None:
        try:
            while not self._over:
                self._look()
        except RuntimeError:  # of the store
            self._end("rank 0's launcher ended, and the store with it")
        except Exception as error:  # noqa: BLE001 - whatever it is, nobody watches from here on
            self._tell_of_failure(error)

    def _look(self) -> None:
        """Wait a while for the end of a process, then check heartbeats, reports and this rank."""
        began = time.monotonic()
        poll, beside = select.poll(), self._beside
        for descriptor in (*beside, self._wake):
            poll.register(descriptor, select.POLLIN)
        for descriptor, _ in poll.poll(1000 * (_POLL_S if self._death is None else _SOON_S)):
            if descriptor == self._wake:
                os.eventfd_read(self._wake)
            else:
                self._tell_of_death(beside.pop(descriptor))
        if self._over:
            return
        if self._store is not None and self._store.check(["reported"]):
            self._end(self._store.get("reported").decode())
        if self._death is not None and time.monotonic() > self._death[1]:
            self._end(self._death[0])
        if self._death is None:
            seen = min(time.monotonic() - began, 2 * _POLL_S)
            self._listen(seen)
            self._look_at_own(seen)

    def _listen(self, seconds: float) -> None:
        """Send a heartbeat, and report the next rank if it has sent none for too long."""
        self._beats.add(str(self._rank), 1)
        heard = self._beats.add(str(self._next), 0)
        self._silent_s = 0.0 if heard > self._heard else self._silent_s + seconds
        self._heard = heard
        if self._silent_s >= self._timeout_s and not self._has_left(self._next):
            self._tell_of_silence(self._next)

    def _look_at_own(self, seconds: float) -> None:
        """Count a long wait of this main thread in the store; report a hang while others wait."""
        if self._store is None or this_rank.num_unhurried or this_rank.count != self._count:
            self._count, self._still_s, self._waits = this_rank.count, 0.0, None
            return
        self._still_s += seconds
        if self._still_s < self._timeout_s:
            return
        if this_rank.is_waiting or self._is_device_at_work():
            self._store.add("waits", 1)
            return
        waits = self._store.add("waits", 0)
        if self._waits is not None and waits > self._waits:
            self._tell_of_oneself()
        self._waits = waits

    def _is_device_at_work(self) -> bool:
        """Whether the main thread waits for its device, which may wait for other ranks."""
        import torch

        if self._device.type != "cuda":
            return False
        return not torch.cuda.default_stream(self._device).query()

    def _is_first(self) -> bool:
        try:
            return self._store is None or self._store.add("word", 1) == 1
        except RuntimeError:  # the store went down with the rank that failed
            return True

    def _has_left(self, rank: int) -> bool:
        return self._store is not None and self._store.check([f"left/{rank}"])

    def _tell(self, failure: str, line: str, error_file: str | None, trace: str = "") -> bool:
        """Report a failure and return True, unless another rank did: then await its report."""
        if not self._is_first():
            self._death = self._death or (failure, time.monotonic() + _REPORT_S)
            return False
        write_line(line + trace)
        tell_launcher(line, error_file)
        self.reported(failure)
        return True

    def _tell_of_death(self, dead: Neighbour) -> None:
        if self._has_left(dead.rank):
            return
        self.has_seen_death = True
        line = f"rank {dead.rank} ({dead.card}) {dead.ending()}{dead.place()}"
        self._tell(f"rank {dead.rank} died", line, dead.card.error_file)

    def _tell_of_silence(self, rank: int) -> None:
        """Report a rank without a heartbeat for too long, and kill it, since it cannot respond."""
        seen = next((one for one in self._beside.values() if one.rank == rank), None)
        if self._cards:
            process = None if seen is None else seen.card.process
            who = f"{self._cards[rank]}"
        else:
            process = siblings().get(rank, (None, None))[0]
            who = f"process {process}" if process is not None else "its process"
        what = "answered" if self._heard else "joined the job"
        line = f"rank {rank} ({who}) has not {what} for {self._timeout_s:g} s: {state(process)}"
        line += "" if seen is None else seen.place()
        short = f"rank {rank} does not answer"
        if not self._tell(short, line, error_file() if seen is None else seen.card.error_file):
            return
        if process is not None:  # else the launcher would wait half a minute for its end
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        self._end("" if seen is None else short)

    def _tell_of_oneself(self) -> None:
        """Report that this rank's main thread hangs."""
        frames = sys._current_frames()[threading.main_thread().ident or 0]
        stack = "".join(traceback.format_stack(frames)).rstrip()
        headline = (
            f"rank {self._rank} failed{_place()}: others wait for it, and it has done nothing new"
            f" for {self._timeout_s:g} s (engine.distributed_timeout)"
        )
        trace = f"\nIt is here (most recent call last):\n{stack}"
        if self._tell(f"rank {self._rank} hangs", headline, error_file(), trace):
            os._exit(1)  # before the others, so that the launcher blames this rank

    def _tell_of_failure(self, error: Exception) -> None:
        """Report that this watch has failed, and end the process."""
        if self._over:
            return
        summary = traceback.format_exception_only(error)[0].splitlines()[0]
        headline = f"rank {self._rank} failed{_place()}: its watch over the others ended: {summary}"
        is_first = self._is_first()
        write_line(f"{headline}\n{''.join(traceback.format_exception(error)).rstrip()}")
        tell_launcher(headline, error_file())
        if is_first:
            self.reported(f"rank {self._rank} failed")
        os._exit(1)

    def _end(self, failure: str) -> None:
        """End this process even if its main thread waits, unless it is ending by itself."""
        if self._over:
            return
        if failure:
            line = f"rank {self._rank} stopped{_place()}, because {failure}{self.own_error}"
            write_line(line)
            tell_launcher(line, error_file())
        time.sleep(_END_S)
        os._exit(1)


_watch: Watch | None = None


def watch(rank: int, size: int, timeout_s: float, device: "torch.device") -> float:
    """Watch the other ranks until ``unwatch``; returns the time-out for process groups.

    Does nothing unless torchrun's agent serves the job's store, on Linux: elsewhere the launcher
    and the process group's time-out notice a dead rank.
    """
    global _watch
    if size == 1 or not has_agent():
        return timeout_s
    _watch = Watch(rank, size, timeout_s, device)
    # A rank may have waited for almost ``timeout_s`` when the rank that it waits for is stopped.
    return 2 * timeout_s + _LATER_S


def meet() -> None:
    """Exchange the cards by which ranks watch one another. Collective over the world."""
    if _watch is not None:
        _watch.meet()


def unwatch() -> None:
    """End the watch: this rank has finished its work."""
    global _watch
    if _watch is not None:
        _watch.close()
        _watch = None


def current() -> Watch | None:
    """The running watch, if any."""
    return _watch


def _place() -> str:
    return f" in {this_rank.activity}" if this_rank.activity else ""
