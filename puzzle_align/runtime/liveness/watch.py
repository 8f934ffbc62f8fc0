"""Ranks watch one another: a job with a dead rank ends within seconds and says which rank died.

A rank that waits for a dead one in a collective would wait until the process group's time-out (NCCL
reports nothing), and would only note the launcher's SIGTERM, to save after the step. So every rank
has a thread that the kernel wakes when another rank's process on its machine ends, and that checks
in the launcher's store every second whether the job has failed elsewhere.

The thread also notices, within the job's time-out, a rank that is alive but makes no progress:
- a stopped process: every rank sends heartbeats to the store, and the rank before it checks them;
- a lost link or host: the rank before sees no heartbeats, and where the store itself is lost, whose
  answers the thread waits for, a second thread ends the process;
- a hanging main thread: others wait for it (in any group), and it waits for nobody. A rank that
  waits is never blamed, however long, nor is one that makes progress, however slow.

Invariants:
- one failure is reported in full, by the first rank that claims the report in the launcher's store;
  every other rank then reports its activity in one line, and ends;
- a rank on the same machine reports for a killed or stopped one, whose activity it reads from
  shared memory;
- a rank that has left the job (``unwatch``) may end in any way;
- a rank that fails before it joins ends those on other machines that wait for it;
- a machine that was suspended as a whole continues: only time in which a thread ran counts;
- torchrun ends the other ranks of its machine with SIGTERM as soon as one has died, also while they
  import, before they have met: a rank then says who was killed, and ends. It says nothing of a rank
  that ended by itself, which has said why, nor once another handler of the signal (the training
  loop's, to save and stop) is installed.
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
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from puzzle_align.runtime.liveness.activity import ACTIVITY_BYTES, note_waits, this_rank
from puzzle_align.runtime.liveness.launcher import error_file, has_agent, tell_launcher, write_line
from puzzle_align.runtime.liveness.neighbours import (
    UNSEEN,
    Card,
    Neighbour,
    neighbours,
    own_card,
    siblings,
)

if TYPE_CHECKING:
    import torch
    from torch.distributed import Store, TCPStore

_POLL_S = 1.0  # until a failure on another machine is noticed
_SEARCH_S = 0.2  # between searches for processes that torchrun is still starting
_SOON_S = 0.02  # between checks for a report that is about to come
_REPORT_S = 3.0  # wait for another rank's report before ending
_GRACE_S = 5.0  # beyond the time-out, until the store counts as lost: reports take as long
_NOTICE_S = 2.0  # from SIGTERM to this process's end, unless a death is noticed
_ASKED = 128 + signal.SIGTERM  # exit code of a process that ends because of the signal
_END_S = 1.0  # between the first failure and other ranks' end: the launcher sees them in that order
_EARLY_S = 5.0  # for the store to answer a rank that ends before it has joined
_NOT_JOINED = "not joined"  # key of why a rank ended before it joined
_LATER_S = 15.0  # from the watch's time-out, which names the culprit, to the process groups'


class Watch:
    """Thread that observes the other ranks, and reports the job's first failure."""

    def __init__(self, rank: int, size: int) -> None:
        """Start observing the processes that torchrun starts beside; ``join`` and ``meet`` next."""
        self.own_error = ""
        self._rank, self._size = rank, size
        self._num_near = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))  # ranks on this machine
        self._next = (rank + 1) % size
        self._over = False
        self._death: tuple[str, float] | None = None  # a failure, and when to stop waiting
        self._lost = ""  # names a rank beside that died before the ranks have met
        self._asked_until: float | None = None  # when to end, since SIGTERM came
        self._wake, self.waker = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._cards: list[Card] = []
        # By descriptor of the process. Those of the start stay open: the thread may poll them.
        self._beside: dict[int, Neighbour] = {}
        self._rounds = 0  # of this thread, each with answers of the store
        self._heard, self._silent_s = 0, 0.0  # the next rank's heartbeats
        self._count, self._still_s = -1, 0.0  # progress of this rank's main thread
        self._waits: int | None = None  # all ranks' announced waits, since this rank stalls
        self._beats: Store | None = None  # once this rank has joined
        self._store: Store | None = None  # of this start of the job, once the ranks have met
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)
        self._thread.start()

    def join(self, timeout_s: float, device: "torch.device") -> None:
        """Start sending heartbeats and checking the next rank's.

        Args:
            timeout_s: how long a rank may be stopped, or keep others waiting.
        """
        import torch.distributed as dist  # not above: the command line imports this without torch

        self._timeout_s, self._device = timeout_s, device
        self._memory = os.memfd_create("activity")
        os.ftruncate(self._memory, ACTIVITY_BYTES)
        this_rank.share(mmap.mmap(self._memory, ACTIVITY_BYTES))
        note_waits()
        threading.Thread(target=self._guard, name="watch's guard", daemon=True).start()
        # A separate connection: waiting for a key in the process group's would block this thread.
        try:
            self._server = _launcher_store(timeout_s)
        except RuntimeError:
            self._end(_store_lost(timeout_s))
        self._beats = dist.PrefixStore(_start_name(), self._server)

    def meet(self) -> None:
        """Exchange cards with the other ranks. Collective over the world."""
        import torch.distributed as dist

        cards: list[Any] = [None] * self._size
        dist.all_gather_object(cards, own_card(self._memory))
        self._cards = cards
        self._beside = {one.descriptor: one for one in neighbours(self._rank, cards)}
        self._store = dist.PrefixStore(f"watch/{cards[0].job}", self._server)
        os.write(self.waker, b"\0")

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
        os.write(self.waker, b"\0")
        self._thread.join()
        this_rank.share(None)

    def _run(self) -> None:
        try:
            while not self._over:
                self._observe()
        except RuntimeError:  # of the store
            self._end("rank 0's launcher ended, and the store with it")
        except Exception as error:  # noqa: BLE001 - whatever it is, nobody watches from here on
            self._report_failure(error)

    def _guard(self) -> None:
        """End this process if its watch waits for the store for too long."""
        silent_s, seen = 0.0, -1
        while not self._over:
            time.sleep(_POLL_S)
            silent_s, seen = 0.0 if self._rounds > seen else silent_s + _POLL_S, self._rounds
            if silent_s >= self._timeout_s + _GRACE_S:
                self._end(_store_lost(silent_s))

    def _observe(self) -> None:
        """Wait a while for the end of a process, then check heartbeats, reports and this rank."""
        self._rounds += 1
        began = time.monotonic()
        wait_s = _POLL_S if self._death is None else _SOON_S
        if self._store is None and len(self._beside) < self._num_near - 1:
            self._find_siblings()
            wait_s = _SEARCH_S
        poll, beside = select.poll(), self._beside
        for descriptor in (*beside, self._wake):
            poll.register(descriptor, select.POLLIN)
        for descriptor, _ in poll.poll(1000 * wait_s):
            if descriptor == self._wake:
                self._note_signals(os.read(self._wake, 4096))
            else:
                self._report_death(beside.pop(descriptor))
        if self._over:
            return
        if self._store is not None and self._store.check(["reported"]):
            self._end(self._store.get("reported").decode())
        if self._store is None and self._beats is not None and self._beats.check([_NOT_JOINED]):
            self._end(self._beats.get(_NOT_JOINED).decode())
        if self._death is not None and time.monotonic() > self._death[1]:
            self._end(self._death[0])
        if self._death is None and self._asked_until is not None:
            self._leave_when_due(self._asked_until)
        if self._death is None and self._beats is not None:
            seconds = min(time.monotonic() - began, 2 * _POLL_S)
            self._check_heartbeats(self._beats, seconds)
            self._check_main_thread(seconds)

    def _find_siblings(self) -> None:
        """Observe the ranks that torchrun has started since the last search."""
        known = {self._rank, *(one.rank for one in self._beside.values())}
        self._beside.update({one.descriptor: one for one in siblings(known)})

    def _note_signals(self, numbers: bytes) -> None:
        """Note when to end, if SIGTERM is among the signals and is this watch's to answer."""
        if signal.SIGTERM in numbers and signal.getsignal(signal.SIGTERM) is _take_note:
            has_met = self._store is not None
            self._asked_until = time.monotonic() + (_NOTICE_S if has_met else 0.0)

    def _leave_when_due(self, deadline: float) -> None:
        """End this process, which was asked to end, after the deadline; others end silently."""
        if time.monotonic() < deadline:
            return
        if self._lost:
            self._end(self._lost)
        if self.claim_report():
            self.reported("")
        tell_launcher(f"rank {self._rank} was asked to end", error_file())
        os._exit(_ASKED)

    def _check_heartbeats(self, beats: "Store", seconds: float) -> None:
        """Send a heartbeat, and report the next rank if it has sent none for too long."""
        beats.add(str(self._rank), 1)
        heard = beats.add(str(self._next), 0)
        self._silent_s = 0.0 if heard > self._heard else self._silent_s + seconds
        self._heard = heard
        if self._silent_s >= self._timeout_s and not self._has_left(self._next):
            self._report_silence(self._next)

    def _check_main_thread(self, seconds: float) -> None:
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
            self._report_hang()
        self._waits = waits

    def _is_device_at_work(self) -> bool:
        """Whether the main thread waits for its device, which may wait for other ranks."""
        import torch

        if self._device.type != "cuda":
            return False
        try:
            return not torch.cuda.default_stream(self._device).query()
        except RuntimeError:  # a kernel has failed, of which the main thread learns soon
            return False

    def _is_first(self) -> bool:
        try:
            return self._store is None or self._store.add("word", 1) == 1
        except RuntimeError:  # the store went down with the rank that failed
            return True

    def _has_left(self, rank: int) -> bool:
        return self._store is not None and self._store.check([f"left/{rank}"])

    def _report(self, failure: str, line: str, error_file: str | None, trace: str = "") -> bool:
        """Report a failure and return True, unless another rank did: then await its report."""
        if not self._is_first():
            self._death = self._death or (failure, time.monotonic() + _REPORT_S)
            return False
        write_line(line + trace)
        tell_launcher(line, error_file)
        self.reported(failure)
        return True

    def _report_death(self, dead: Neighbour) -> None:
        ending = dead.ending()
        line = f"rank {dead.rank} ({dead.name}) {ending}{dead.place()}"
        if self._store is None:
            has_said_why = dead.error_file is not None and Path(dead.error_file).exists()
            if not ending.startswith("ended") and not has_said_why:
                self._lost = line  # a failure only if torchrun asks the others to end
        elif not self._has_left(dead.rank):
            self._report(f"rank {dead.rank} died", line, dead.error_file)

    def _report_silence(self, rank: int) -> None:
        """Report a rank without a heartbeat for too long, and kill it, since it cannot respond."""
        neighbour = next((one for one in self._beside.values() if one.rank == rank), None)
        who = neighbour.name if neighbour else self._cards[rank] if self._cards else "its process"
        what = "answered" if self._heard else "joined the job"
        why = f"{neighbour.state()}{neighbour.place()}" if neighbour else UNSEEN
        line = f"rank {rank} ({who}) has not {what} for {self._timeout_s:g} s: {why}"
        short = f"rank {rank} does not answer"
        if not self._report(short, line, neighbour.error_file if neighbour else error_file()):
            return
        if neighbour is not None:  # else the launcher would wait half a minute for its end
            with suppress(ProcessLookupError):
                os.kill(neighbour.process, signal.SIGKILL)
        self._end(short if neighbour else "")

    def _report_hang(self) -> None:
        """Report that this rank's main thread hangs."""
        frames = sys._current_frames()[threading.main_thread().ident or 0]
        stack = "".join(traceback.format_stack(frames)).rstrip()
        headline = (
            f"rank {self._rank} failed{_place()}: others wait for it, and it has done nothing new"
            f" for {self._timeout_s:g} s (engine.distributed_timeout)"
        )
        trace = f"\nIt is here (most recent call last):\n{stack}"
        if self._report(f"rank {self._rank} hangs", headline, error_file(), trace):
            os._exit(1)  # before the others, so that the launcher blames this rank

    def _report_failure(self, error: Exception) -> None:
        """Report that this watch has failed, and end the process."""
        if self._over:
            return
        summary = traceback.format_exception_only(error)[0].splitlines()[0]
        line = f"rank {self._rank} failed{_place()}: its watch over the others ended: {summary}"
        trace = "".join(traceback.format_exception(error)).rstrip()
        if not self._report(f"rank {self._rank} failed", line, error_file(), f"\n{trace}"):
            write_line(f"{line}\n{trace}")
        os._exit(1)

    def _end(self, failure: str) -> None:
        """End this process even if its main thread waits, unless it is ending by itself."""
        if self._over:
            return
        if failure:
            place = " while it started" if self._store is None else _place()
            line = f"rank {self._rank} stopped{place}, because {failure}{self.own_error}"
            write_line(line)
            tell_launcher(line, error_file())
        time.sleep(_END_S)
        os._exit(1)


_watch: Watch | None = None


def start() -> None:
    """Observe the ranks that torchrun starts beside this one, and answer SIGTERM, from here on.

    Does nothing unless torchrun's agent serves the job's store, on Linux: elsewhere the launcher
    and closed connections tell of a dead rank, and the groups' time-outs of a stopped one, where it
    keeps no file operation waiting (``collectives.patient_group``).
    """
    global _watch
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1 or not has_agent():
        return
    _watch = Watch(int(os.environ["RANK"]), size)
    signal.signal(signal.SIGTERM, _take_note)
    signal.set_wakeup_fd(_watch.waker, warn_on_full_buffer=False)
    os.register_at_fork(after_in_child=_restore_signals)


def watch(timeout_s: float, device: "torch.device") -> float:
    """Watch the other ranks until ``unwatch``; returns the time-out for process groups."""
    if _watch is None:
        start()
    if _watch is None:
        return timeout_s
    _watch.join(timeout_s, device)
    # A rank may have waited for almost ``timeout_s`` when the rank that it waits for is stopped.
    return 2 * timeout_s + _LATER_S


def end_joined(failure: str) -> None:
    """Let ranks that have joined end, giving ``failure`` as the reason: this one cannot join.

    Does nothing on a single machine, where the launcher ends them, or without a watch, or if the
    launcher's store does not answer.
    """
    if _watch is None or os.environ.get("LOCAL_WORLD_SIZE") == os.environ["WORLD_SIZE"]:
        return
    import torch.distributed as dist  # not above: the command line imports this without torch

    with suppress(RuntimeError):
        server = _launcher_store(_EARLY_S)
        dist.PrefixStore(_start_name(), server).set(_NOT_JOINED, failure)


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
        _restore_signals()


def current() -> Watch | None:
    """The running watch, if this process has joined the job with one."""
    return _watch if _watch is not None and _watch._beats is not None else None


def start_store(timeout_s: float) -> "Store | None":
    """Store in which the ranks of this start meet; None: torch's own, where torchrun has none.

    torchrun's restarts (``--max-restarts``) keep the store, and torch the names of its keys: ranks
    would connect to the addresses of the start before.
    """
    if not has_agent():
        return None
    import torch.distributed as dist  # not above: the command line imports this without torch

    return dist.PrefixStore(f"ranks/{_start_name()}", _launcher_store(timeout_s))


def _launcher_store(timeout_s: float) -> "TCPStore":
    """Connect to the store that the launcher serves."""
    import torch.distributed as dist  # not above: the command line imports this without torch

    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    timeout = timedelta(seconds=timeout_s)
    return dist.TCPStore(address, port, timeout=timeout, wait_for_workers=False)


def _start_name() -> str:
    """Prefix, in the launcher's store, of keys that ranks use before they have met."""
    start = (os.environ.get(f"TORCHELASTIC_{name}", "") for name in ("RUN_ID", "RESTART_COUNT"))
    return "/".join(("beats", *start))


def _take_note(_signal: int, _frame: FrameType | None) -> None:
    """Handle SIGTERM by doing nothing: the wake-up descriptor notifies the watch's thread."""


def _restore_signals() -> None:
    """Restore SIGTERM's default, and stop waking the thread, which a forked process lacks."""
    if signal.getsignal(signal.SIGTERM) is _take_note:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.set_wakeup_fd(-1)


def _store_lost(seconds: float) -> str:
    where = f"the launcher's store on {os.environ['MASTER_ADDR']}"
    return f"{where} has not answered for {seconds:g} s: its host is lost"


def _place() -> str:
    return f" in {this_rank.activity}" if this_rank.activity else ""
