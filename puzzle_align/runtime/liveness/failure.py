"""Reports of failures: the job's first failure is written in full, before any other output.

When another rank fails, its closed connection may raise an error here before its own report is
out: this rank then waits, so that the watch reports the cause.
"""

import os
import platform
import signal
import time
import traceback
from contextlib import suppress
from pathlib import Path

from puzzle_align.runtime.liveness import watch
from puzzle_align.runtime.liveness.launcher import error_file, tell_launcher, write_line

PATIENCE_S = 15.0  # wait of ranks other than 0 before reporting an error that rank 0 probably has
SOON_S = 1.0  # the same for an error that all ranks have at once
_LONE_S = 5.0  # wait of a rank that lost another: the watch should report and end it sooner


class CannotGoOn(ValueError):
    """Reason for ending a running job, in one line for the user.

    Other ValueErrors during a run are bugs of the package, reported with tracebacks.
    """

    def __init__(self, line: str, details: str = "") -> None:
        """``details`` are a traceback of the user's code, for a file beside the line."""
        super().__init__(line)
        self.details = details


_folder: Path | None = None  # for details


def keep_details_in(folder: Path) -> None:
    """Name the folder for files of details: the job's output."""
    global _folder
    _folder = folder


def kept(details: str) -> str:
    """Write details to this rank's file, if there is a folder; return where to read them."""
    with suppress(OSError):
        if _folder is not None:
            file = _folder / f"traceback_rank{rank()}.txt"
            file.write_text(details, encoding="utf-8")
            return f"traceback: {file}"
    return "--debug shows the traceback"


def rank() -> int:
    """Rank of this process, from the launcher; 0 without one."""
    return int(os.environ.get("RANK", "0"))


def named_rank() -> str:
    """Name of this process's rank for messages, with its host where the job has several."""
    is_one_host = os.environ.get("LOCAL_WORLD_SIZE") in (None, os.environ.get("WORLD_SIZE"))
    return f"rank {rank()}" if is_one_host else f"rank {rank()} ({platform.node()})"


def lost_peer(error: BaseException) -> bool:
    """Whether ``error`` or a cause of it is a lost connection to another rank."""
    arisen: BaseException | None = error
    while arisen is not None:
        # gloo's errors are plain RuntimeErrors that name its source file.
        if "gloo/" in str(arisen) or any(c.__name__ == "DistError" for c in type(arisen).__mro__):
            return True
        arisen = arisen.__cause__ or arisen.__context__
    return False


def report(error: Exception) -> None:
    """Report this rank's failure on stderr, once: its activity and the traceback.

    If another rank failed first, that one reports, and the watch ends this one.
    """
    if watch.current() is not None:  # the watch ends this process, after the report
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if lost_peer(error):
        time.sleep(_LONE_S)
    elif watch.current() is None and rank() != 0:
        time.sleep(PATIENCE_S)  # the ranks have not met yet: rank 0 probably has the same error
    place = next((f" {n}" for n in getattr(error, "__notes__", ()) if n.startswith("in ")), "")
    summary = traceback.format_exception_only(error)[0].splitlines()[0]
    headline = f"rank {rank()} failed{place}: {summary}"
    trace = "".join(traceback.format_exception(error)).rstrip()
    report_text(headline, f"{headline}\n{trace}", in_short=f"rank {rank()} failed")


def report_text(message: str, text: str, *, in_short: str = "") -> None:
    """Write ``text`` to stderr if this rank is the first with a failure to report.

    Args:
        message: the line that the launcher repeats at its end.
        in_short: the reason that other ranks give for ending; empty: they end silently.
    """
    watcher = watch.current()
    if watcher is None or watcher.claim_report():
        write_line(text)
        tell_launcher(message, error_file())
        if watcher is not None:
            watcher.reported(in_short)
        else:
            name = named_rank()
            watch.end_joined(f"{name} ended: {message.removeprefix(f'error on {name}: ')}")
    else:
        watcher.own_error = f" (its own error: {message})"
        time.sleep(_LONE_S)  # the watch ends this process during the sleep
