"""Ranks look out for one another: a job with a dead rank ends within seconds and says who died.

A rank that waits for a dead one in a collective would wait until the process group's time-out (NCCL
tells it nothing), and of the launcher's SIGTERM it would only take note, to save after the step. So
every rank has a thread that the kernel wakes when a process beside it ends, and that asks the
launcher's store every second whether the job has failed elsewhere.

Invariants:
- one failure is reported in full, by the first rank that claims this in the launcher's store; every
  other rank then says in one line what it was doing, and ends;
- a rank that was killed cannot speak: one beside it does, and reads what it was doing from memory
  that the two share;
- a rank that has left the job (``unwatch``) may end as it likes.

Of a machine that is lost with all its ranks nobody can report: the process group's errors and its
time-out do.
"""

import json
import mmap
import os
import select
import signal
import socket
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.distributed import Store

_POLL_S = 1.0  # how soon a failure on another machine is known
_SOON_S = 0.02  # how often to ask for what is about to be reported
_REPORT_S = 3.0  # a failure's report may take this long before those who know of it end
_END_S = 1.0  # between the first failure and other ranks' end: the launcher sees them in that order
_ACTIVITY_BYTES = 256


@dataclass(frozen=True)
class _Card:
    """How a rank's neighbours can watch it."""

    job: str  # rank 0's is the name of this start of the job
    machine: str  # ranks with the same one see each other's processes
    host: str
    process: int
    activity: int  # the process's descriptor of the memory that says what it is doing
    error_file: str | None  # where the launcher looks for its last words


class Watch:
    """This rank's eye on the others, and its part in saying who failed first."""

    def __init__(self, rank: int, size: int) -> None:
        """Start watching. Collective over the world."""
        import torch.distributed as dist  # not above: the command line imports this without torch

        self.own_error = ""
        self.activity = ""
        self._rank = rank
        self._over = False
        self._death: tuple[str, float] | None = None  # one beside us, and when not to wait longer
        self._stop = os.eventfd(0)
        self._file = tempfile.TemporaryFile()  # noqa: SIM115 - open as long as the process lives
        self._file.truncate(_ACTIVITY_BYTES)
        self._activity = mmap.mmap(self._file.fileno(), _ACTIVITY_BYTES)
        self._cards: list[Any] = [None] * size
        dist.all_gather_object(self._cards, _own_card(self._file.fileno()))
        # A connection of its own: a rank that waits for a key in the group's would block this one.
        server = dist.TCPStore(
            os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), wait_for_workers=False
        )
        self._store: Store = dist.PrefixStore(f"watch/{self._cards[0].job}", server)
        self._beside = dict(self._neighbours())
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)
        self._thread.start()

    def set_activity(self, what: str) -> None:
        """Say what this rank is doing; the text outlives the process."""
        self.activity = what
        text = what.encode()[:_ACTIVITY_BYTES]
        self._activity[:] = text.ljust(_ACTIVITY_BYTES, b"\0")

    def claim_report(self) -> bool:
        """Whether this rank is the first to fail: it then calls ``reported`` and ends by itself."""
        self._over = self._is_first()
        return self._over

    def reported(self, failure: str) -> None:
        """Let the others end: the failure is reported; ``failure`` is it in short.

        Without any text they end silently, for they have nothing to add.
        """
        with suppress(RuntimeError):  # the store is gone
            self._store.set("reported", failure)
        if len(self._beside) + 1 < len(self._cards):
            time.sleep(2 * _POLL_S)  # the launcher may take the store with it: let others ask first

    def close(self) -> None:
        """Leave: from here on this process may end without anyone taking it for dead."""
        with suppress(RuntimeError):  # the store is gone
            self._store.set(f"left/{self._rank}", "")
        self._over = True
        os.eventfd_write(self._stop, 1)
        self._thread.join()

    def _neighbours(self) -> Iterator[tuple[int, tuple[int, int]]]:
        """Ranks on this machine, by the descriptor of their process; and that of their activity."""
        own = self._cards[self._rank]
        for rank, card in enumerate(self._cards):
            if rank == self._rank or card.machine != own.machine:
                continue
            try:
                activity = os.open(f"/proc/{card.process}/fd/{card.activity}", os.O_RDONLY)
                yield os.pidfd_open(card.process), (rank, activity)
            except OSError:  # a container that hides processes: its launcher will notice
                continue

    def _run(self) -> None:
        poll = select.poll()
        for descriptor in (*self._beside, self._stop):
            poll.register(descriptor, select.POLLIN)
        try:
            while not self._over:
                pause = _POLL_S if self._death is None else _SOON_S
                for descriptor, _ in poll.poll(1000 * pause):
                    poll.unregister(descriptor)
                    if descriptor in self._beside:
                        self._tell_of_death(*self._beside[descriptor])
                if self._store.check(["reported"]):
                    self._end(self._store.get("reported").decode())
                if self._death is not None and time.monotonic() > self._death[1]:
                    self._end(self._death[0])
        except RuntimeError:  # of the store
            self._end("rank 0's launcher ended, and the store with it")

    def _is_first(self) -> bool:
        try:
            return self._store.add("word", 1) == 1
        except RuntimeError:  # the store went down with the rank that failed
            return True

    def _tell_of_death(self, rank: int, activity: int) -> None:
        if self._store.check([f"left/{rank}"]):
            return
        if not self._is_first():
            self._death = self._death or (f"rank {rank} died", time.monotonic() + _REPORT_S)
            return
        card = self._cards[rank]
        place = _place(os.pread(activity, _ACTIVITY_BYTES, 0))
        line = f"rank {rank} (process {card.process} on {card.host}) {_ending(card.process)}{place}"
        write_line(line)
        tell_launcher(line, card.error_file)
        self.reported(f"rank {rank} died")

    def _end(self, failure: str) -> None:
        """End this process, whatever its main thread is waiting for; unless it ends by itself."""
        if self._over:
            return
        if failure:
            place = _place(self._activity[:])
            line = f"rank {self._rank} stopped{place}, because {failure}{self.own_error}"
            write_line(line)
            tell_launcher(line, error_file())
        time.sleep(_END_S)
        os._exit(1)


_watch: Watch | None = None


def watch(rank: int, size: int) -> None:
    """Watch the other ranks until ``unwatch``. Collective over the world.

    Does nothing where torchrun's agent does not keep the job's store, or on other systems than
    Linux: there a dead rank is noticed by the launcher and by the process group's time-out.
    """
    global _watch
    kept = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if size > 1 and kept and sys.platform == "linux":
        _watch = Watch(rank, size)


def unwatch() -> None:
    """End the watch: this rank has done its part in the job."""
    global _watch
    if _watch is not None:
        _watch.close()
        _watch = None


def current() -> Watch | None:
    """The watch that is under way."""
    return _watch


@contextmanager
def activity(what: str) -> Iterator[None]:
    """Do something that is worth a word if this rank fails, dies or hangs in it.

    Raises:
        Exception: whatever the block raised, with the note ``in WHAT``.
    """
    outer = ""
    if _watch is not None:
        outer = _watch.activity
        _watch.set_activity(what)
    try:
        yield
    except Exception as error:
        error.add_note(f"in {what}")
        raise
    if _watch is not None:  # after an error it stays: what follows is this rank's end
        _watch.set_activity(outer)


def write_line(text: str) -> None:
    """Write to stderr in one piece: other processes write there too."""
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


def error_file() -> str | None:
    """Where torchrun looks for this process's last words, to be part of its closing ones."""
    return os.environ.get("TORCHELASTIC_ERROR_FILE")


def tell_launcher(message: str, file: str | None) -> None:
    """Leave a failed rank's last words in its ``error_file``, whole: torchrun reads it any time."""
    if file is None:
        return
    details = {"py_callstack": message, "timestamp": str(int(time.time()))}
    report = {"message": {"message": message, "extraInfo": details}}
    draft = Path(f"{file}.{os.getpid()}")
    with suppress(OSError):  # the launcher that goes at once takes the folder with it
        draft.write_text(json.dumps(report), encoding="utf-8")
        draft.rename(file)


def _own_card(activity: int) -> _Card:
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    machine = f"{boot} {os.stat('/proc/self/ns/pid').st_ino}"
    return _Card(
        job=uuid.uuid4().hex,
        machine=machine,
        host=socket.gethostname(),
        process=os.getpid(),
        activity=activity,
        error_file=error_file(),
    )


def _place(activity: bytes) -> str:
    what = activity.rstrip(b"\0").decode(errors="replace")
    return f" in {what}" if what else ""


def _ending(process: int) -> str:
    """What became of a dead process, as long as its parent has not asked."""
    try:
        stat = Path(f"/proc/{process}/stat").read_text()
    except OSError:
        return "died"
    status = int(stat.rpartition(")")[2].split()[49])  # proc_pid_stat(5): exit_code
    code = os.waitstatus_to_exitcode(status)
    return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
