"""View of other ranks on this machine: alive, stopped or dead, and their activity.

A rank's activity lies in memory that it shares and that outlives it (``liveness.activity``).
"""

import os
import socket
import uuid
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from puzzle_align.files.messages import ending
from puzzle_align.runtime.liveness.activity import ACTIVITY_BYTES
from puzzle_align.runtime.liveness.launcher import error_file

UNSEEN = "it is stopped, or its machine is gone"  # a process that this one cannot see


@dataclass(frozen=True)
class Card:
    """Identifiers by which other ranks find a rank's process and activity."""

    job: str  # rank 0's names this start of the job
    machine: str  # ranks with the same one see each other's processes
    host: str
    process: int
    activity: int  # the process's descriptor of the memory that holds its activity
    error_file: str | None  # where the launcher looks for its error message

    def __str__(self) -> str:
        return f"process {self.process} on {self.host}"


@dataclass(frozen=True)
class Neighbour:
    """A rank whose process is visible from this one."""

    rank: int
    process: int
    name: str  # of the process, in messages
    error_file: str | None  # where the launcher looks for its error message
    descriptor: int  # of the process: readable once it has ended
    activity: int | None = None  # descriptor of its memory; None before the ranks have met

    def place(self) -> str:
        """The rank's last activity as `` in WHAT``; empty if it has set none."""
        if self.activity is None:
            return ""
        what = os.pread(self.activity, ACTIVITY_BYTES, 0).rstrip(b"\0").decode(errors="replace")
        return f" in {what}" if what else ""

    def ending(self) -> str:
        """How the dead process ended: ``was ended by SIGKILL``; ``died`` once it is reaped."""
        try:
            status = int(_stat(self.process)[49])  # exit_code
        except OSError:
            return "died"
        return ending(os.waitstatus_to_exitcode(status))

    def state(self) -> str:
        """Why the process does not answer, in words."""
        try:
            letter = _stat(self.process)[0]
        except OSError:
            return UNSEEN
        return "it is stopped" if letter in "Tt" else "it is alive, but does not answer"


def own_card(activity: int) -> Card:
    """This process's card; ``activity`` is the descriptor of its shared memory."""
    host = socket.gethostname()
    return Card(
        job=uuid.uuid4().hex,
        machine=f"{_boot(host)} {os.stat('/proc/self/ns/pid').st_ino}",
        host=host,
        process=os.getpid(),
        activity=activity,
        error_file=error_file(),
    )


def _boot(host: str) -> str:
    """Identifier of this machine's start; ``host`` where the kernel gives none (sandboxes)."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return host


def neighbours(this_rank: int, cards: Sequence[Card]) -> list[Neighbour]:
    """Other ranks on the machine of ``this_rank``, from all ranks' cards."""
    on_machine = []
    for rank, card in enumerate(cards):
        if rank == this_rank or card.machine != cards[this_rank].machine:
            continue
        with suppress(OSError):  # a container that hides processes: its launcher will notice
            activity = os.open(f"/proc/{card.process}/fd/{card.activity}", os.O_RDONLY)
            descriptor = os.pidfd_open(card.process)
            on_machine.append(
                Neighbour(rank, card.process, f"{card}", card.error_file, descriptor, activity)
            )
    return on_machine


def siblings(known: Collection[int]) -> list[Neighbour]:
    """Ranks that this process's launcher has started, without cards, but for the ``known`` ones."""
    started = []
    for folder in Path("/proc").glob("[0-9]*"):
        process = int(folder.name)
        with suppress(OSError):  # another user's, or gone
            if _stat(process)[1] != str(os.getppid()):
                continue
            text: str = (folder / "environ").read_bytes().decode(errors="replace")
            named = dict(line.split("=", 1) for line in text.split("\0") if "=" in line)
            rank, file = int(named.get("RANK", "-1")), named.get("TORCHELASTIC_ERROR_FILE")
            if rank >= 0 and rank not in known:
                descriptor = os.pidfd_open(process)
                started.append(Neighbour(rank, process, f"process {process}", file, descriptor))
    return started


def _stat(process: int) -> list[str]:
    """Fields of proc_pid_stat(5), from the state on."""
    text = Path(f"/proc/{process}/stat").read_text(errors="replace")  # a name may be any bytes
    return text.rpartition(")")[2].split()
