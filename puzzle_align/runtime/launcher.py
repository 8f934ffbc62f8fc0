"""A rank does not outlive its launcher, whatever ends that, at whatever moment."""

import ctypes
import os
import signal
import socket
import sys

from puzzle_align.runtime.last_words import write_line

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_CONNECT_S = 5.0


def end_with_launcher() -> None:
    """Have the kernel kill this process as soon as torchrun's agent, its parent, is gone.

    A rank that lives on would go on training, and keep the folder of checkpoints from the run that
    is to resume. Under other launchers nothing is done: they end their processes themselves, or
    the thread that started this one may end before the job.

    Exits with code 1 where the agent has gone already.
    """
    if not has_agent():
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # What happened before: the agent keeps the job's store, and had opened it before it began this
    # process. (The parent's number tells less: an orphan's new parent may be any process.)
    place = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    try:
        socket.create_connection(place, _CONNECT_S).close()
    except ConnectionRefusedError:
        write_line("the launcher is gone: this rank ends")
        os._exit(1)
    except OSError:
        return  # whatever is wrong with the network will be told where the ranks meet


def has_agent() -> bool:
    """Whether an agent of torchrun's started this process, and keeps the job's store."""
    kept = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return kept and sys.platform == "linux"
