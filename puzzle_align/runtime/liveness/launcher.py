"""Connection of a rank with torchrun, its launcher.

A rank does not outlive its launcher, however and whenever that ends. A rank that fails writes whole
lines to stderr, and leaves a file whose message torchrun repeats at its end.
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


_note_parent()  # early: the command line imports this module first
os.register_at_fork(after_in_child=_note_parent)


def end_with_launcher() -> None:
    """Let the kernel kill this process as soon as torchrun's agent, its parent, is gone.

    An orphaned rank would continue training, and hold the lock of the checkpoint folder that the
    resumed run needs. Does nothing under other launchers: they end their processes themselves, or
    the thread that started this process may end before the job.

    Exits with code 1 if the agent is gone already.
    """
    if not has_agent():
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # The agent may be gone already: since the first imports the parent has changed, or it never was
    # the agent. An orphan's new parent may be any process; but the agent (the first node's) serves
    # the job's store, and opened it before it started this process.
    if os.getppid() != _parent:
        _end()
    place = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    try:
        socket.create_connection(place, _CONNECT_S).close()
    except ConnectionRefusedError:
        _end()
    except OSError:
        return  # a network error is reported when the ranks meet


def _end() -> NoReturn:
    write_line("the launcher is gone: this rank ends")
    os._exit(1)


def has_agent() -> bool:
    """Whether a torchrun agent started this process and serves the job's store."""
    has_store = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return has_store and sys.platform == "linux"


def write_line(text: str) -> None:
    """Write a line to stderr in one piece, since other processes write there too."""
    with suppress(OSError):  # a log on a full disk must not stop the process from ending
        clear = "\r\x1b[J" if sys.stderr.isatty() else ""  # of the progress that is drawn below
        sys.stderr.write(f"{clear}{text}\n")
        sys.stderr.flush()


def error_file() -> str | None:
    """File in which torchrun looks for this process's error message, to repeat it at its end."""
    return os.environ.get("TORCHELASTIC_ERROR_FILE")


def tell_launcher(message: str, file: str | None) -> None:
    """Write a failed rank's message to its ``error_file``, atomically: torchrun may be reading."""
    if file is None:
        return
    details = {"py_callstack": message, "timestamp": str(int(time.time()))}
    report = {"message": {"message": message, "extraInfo": details}}
    draft = Path(f"{file}.{os.getpid()}")
    with suppress(OSError):  # a launcher that ends at once deletes the folder
        draft.write_text(json.dumps(report), encoding="utf-8")
        draft.rename(file)
