"""A rank and torchrun, its launcher: they end together, and it repeats a failed rank's words.

A rank does not outlive its launcher, whatever ends that, at whatever moment. A rank that fails
writes whole lines on stderr, and leaves a file that the launcher repeats in its closing words.
"""

import ctypes
import json
import os
import signal
import socket
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_CONNECT_S = 5.0
_parent = 0


def _note_parent() -> None:
    global _parent
    _parent = os.getppid()


_note_parent()  # the command line imports this early
os.register_at_fork(after_in_child=_note_parent)


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
    # What happened before: this process has had another parent since its first imports, or never
    # had the agent for one. An orphan's new parent may be any process; but the agent keeps the
    # job's store (of several nodes the first one's does), and had opened it before it began this.
    if os.getppid() != _parent:
        _end()
    place = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    try:
        socket.create_connection(place, _CONNECT_S).close()
    except ConnectionRefusedError:
        _end()
    except OSError:
        return  # whatever is wrong with the network will be told where the ranks meet


def _end() -> NoReturn:
    write_line("the launcher is gone: this rank ends")
    os._exit(1)


def has_agent() -> bool:
    """Tell whether a torchrun agent started this process and keeps the job's store."""
    kept = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return kept and sys.platform == "linux"


def write_line(text: str) -> None:
    """Write to stderr in one piece: other processes write there too."""
    with suppress(OSError):  # a log on a full disk must not keep the process from its end
        sys.stderr.write(f"{text}\n")
        sys.stderr.flush()


def error_file() -> str | None:
    """The file in which torchrun looks for this process's last words, to repeat them at its end."""
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
