"""View of other ranks on this machine: alive, stopped or dead, and their activity.

A rank's activity lies in memory that it shares and that outlives it (``liveness.activity``).
"""

import os
import socket
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from puzzle_align.files.messages import ending
from puzzle_align.runtime.liveness.activity import ACTIVITY_BYTES
from puzzle_align.runtime.liveness.launcher import error_file


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
    card: Card
    process: int  # a descriptor, which is readable once the process has ended
    _activity: int

    def place(self) -> str:
        """The rank's last activity as `` in WHAT``; empty if it has set none."""
        return place(os.pread(self._activity, ACTIVITY_BYTES, 0))

    def ending(self) -> str:
        """How the dead process ended, in words."""
        return how_it_ended(self.card.process)


def own_card(activity: int) -> Card:
    """This process's card; ``activity`` is the descriptor of its shared memory."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return Card(
        job=uuid.uuid4().hex,
        machine=f"{boot} {os.stat('/proc/self/ns/pid').st_ino}",
        host=socket.gethostname(),
        process=os.getpid(),
        activity=activity,
        error_file=error_file(),
    )


def neighbours(this_rank: int, cards: Sequence[Card]) -> list[Neighbour]:
    """Other ranks on the machine of ``this_rank``, from all ranks' cards."""
    on_machine = []
    for rank, card in enumerate(cards):
        if rank == this_rank or card.machine != cards[this_rank].machine:
            continue
        try:
            activity = os.open(f"/proc/{card.process}/fd/{card.activity}", os.O_RDONLY)
            on_machine.append(Neighbour(rank, card, os.pidfd_open(card.process), activity))
        except OSError:  # a container that hides processes: its launcher will notice
            continue
    return on_machine


def siblings() -> dict[int, tuple[int, str | None]]:
    """Process id and error file, by rank, of the ranks that this rank's launcher started."""
    processes = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if _stat(int(folder.name))[1] != str(os.getppid()):
                continue
            text: str = (folder / "environ").read_bytes().decode(errors="replace")
        except OSError:  # another user's, or gone
            continue
        pairs = dict(line.split("=", 1) for line in text.split("\0") if "=" in line)
        if "RANK" in pairs:
            processes[int(pairs["RANK"])] = int(folder.name), pairs.get("TORCHELASTIC_ERROR_FILE")
    return processes


def how_it_ended(process: int) -> str:
    """How a process ended, such as ``was ended by SIGKILL``; ``died`` once its parent reaped it."""
    try:
        status = int(_stat(process)[49])  # exit_code
    except OSError:
        return "died"
    return ending(os.waitstatus_to_exitcode(status))


def state(process: int | None) -> str:
    """Why a process does not answer, in words; None: a process on another machine."""
    try:
        letter = "" if process is None else _stat(process)[0]
    except OSError:
        letter = ""
    if not letter:
        return "it is stopped, or its machine is gone"
    return "it is stopped" if letter in "Tt" else "it is alive, but does not answer"


def place(activity: bytes) -> str:
    """An activity read from shared memory as `` in WHAT``; empty if none is set."""
    what = activity.rstrip(b"\0").decode(errors="replace")
    return f" in {what}" if what else ""


def _stat(process: int) -> list[str]:
    """Fields of proc_pid_stat(5), from the state on."""
    return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
