"""Reports of failures: the job's first one is written in full, before all else.

An error that only tells that another rank is gone (its connection closed) may reach this rank
before the other's failure is known: such a rank first gives the watch time to tell.
"""

import os
import signal
import time
import traceback

from puzzle_align.runtime.liveness import watch
from puzzle_align.runtime.liveness.launcher import error_file, tell_launcher, write_line

PATIENCE_S = 15.0  # before ranks other than 0 report an error that probably all of them have
SOON_S = 1.0  # before ranks other than 0 report an error that all of them met at once
_LONE_S = 5.0  # before a rank that lost another one reports: the watch reports and ends it sooner


class CannotGoOn(ValueError):
    """A reason for which a job under way ends, in one line for the user.

    Other ValueErrors in the work are mistakes of the package, and reported with tracebacks.
    """

    def __init__(self, line: str, details: str = "") -> None:
        """``details`` is what may follow the line: how the user's own code came to it."""
        super().__init__(line)
        self.details = details


def rank() -> int:
    """This process's rank, as the launcher says; 0 alone."""
    return int(os.environ.get("RANK", "0"))


def lost_peer(error: BaseException) -> bool:
    """Tell whether ``error``, or its cause, is that another rank could not be reached."""
    arisen: BaseException | None = error
    while arisen is not None:
        # gloo's errors are plain RuntimeErrors that name its source file.
        if "gloo/" in str(arisen) or any(c.__name__ == "DistError" for c in type(arisen).__mro__):
            return True
        arisen = arisen.__cause__ or arisen.__context__
    return False


def report(error: Exception) -> None:
    """Say on stderr, once, that this rank failed: its activity and the traceback.

    Where another rank failed first, it speaks, and the watch ends this one.
    """
    if watch.current() is not None:  # which ends this process, and not before it has spoken
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if lost_peer(error):
        time.sleep(_LONE_S)
    elif watch.current() is None and rank() != 0:
        time.sleep(PATIENCE_S)  # the ranks have not met yet: what is wrong here is wrong on rank 0
    place = next((f" {n}" for n in getattr(error, "__notes__", ()) if n.startswith("in ")), "")
    summary = traceback.format_exception_only(error)[0].splitlines()[0]
    headline = f"rank {rank()} failed{place}: {summary}"
    trace = "".join(traceback.format_exception(error)).rstrip()
    report_text(headline, f"{headline}\n{trace}", in_short=f"rank {rank()} failed")


def report_text(message: str, text: str, *, in_short: str = "") -> None:
    """Write ``text`` to stderr if this rank is the first that has a failure to report.

    Args:
        message: what the launcher repeats at its end.
        in_short: the failure, as the reason for which other ranks say that they end; without it
            they end silently.
    """
    seen = watch.current()
    if seen is None or seen.claim_report():
        write_line(text)
        tell_launcher(message, error_file())
        if seen is not None:
            seen.reported(in_short)
    else:
        seen.own_error = f" (its own error: {message})"
        time.sleep(_LONE_S)  # the watch ends this process meanwhile
