"""The guard: a process above the one that calls reward functions, which ends all that is below it.

Whatever functions start is a descendant of the guard and stays one: also in sessions of their own
(as programs that run model-written code are started), and when what started them has ended, since
the kernel then makes them the guard's children. So nothing outlives the rank, or the process that
calls the functions, however either came to its end. Linux only.
"""

import ctypes
import os
import resource
import select
import signal
import time
from contextlib import suppress

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h
_END_S = 4.0  # what descendants may take to be gone; some cannot be killed
_POLL_S = 0.01


def guarded(rank: int, *inherited: int) -> None:
    """Return in a new process, in a session of its own, and guard it in this one, which never does.

    This one ends as the new one does: by the same signal or with the same code. It hands SIGQUIT on
    to it, and SIGTERM ends both.

    Args:
        rank: the process that this one serves.
        inherited: descriptors that the new process alone is to have.
    """
    if not hasattr(os, "pidfd_open"):
        return
    guard = os.getpid()
    prctl = ctypes.CDLL(None).prctl
    prctl(_PR_SET_CHILD_SUBREAPER, 1)
    child = os.fork()
    if child == 0:
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != guard:
            os._exit(1)
        os.setsid()  # a function may kill its own group
        return
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2, *inherited):
        os.dup2(nothing, descriptor)
    _end_as(_guard(rank, child))


def _guard(rank: int, child: int) -> int:
    """Wait for the end of one of the two, and end all that is left; the child's status."""
    told, tell = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(tell, warn_on_full_buffer=False)
    for number in (signal.SIGCHLD, signal.SIGQUIT, signal.SIGTERM):
        signal.signal(number, lambda number, frame: None)
    ended = _reaped()  # what came before the handler
    poll = select.poll()
    poll.register(told, select.POLLIN)
    with suppress(ProcessLookupError):  # the rank has ended already
        poll.register(process := os.pidfd_open(rank), select.POLLIN)
        while child not in ended:
            ready = [descriptor for descriptor, _ in poll.poll()]
            signals = os.read(told, 4096) if told in ready else b""
            if process in ready or signal.SIGTERM in signals:
                break
            if signal.SIGQUIT in signals:
                os.kill(child, signal.SIGQUIT)  # not reaped: it is there
            ended |= _reaped()
    return {**ended, **_end_descendants()}.get(child, 1 << 8)


def _end_descendants() -> dict[int, int]:
    """Kill them all, again and again until none is left; statuses of those that were children."""
    ended: dict[int, int] = {}
    deadline = time.monotonic() + _END_S
    while (left := _descendants(os.getpid())) and time.monotonic() < deadline:
        for process in left:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(process, signal.SIGKILL)
        time.sleep(_POLL_S)
        ended |= _reaped()
    return ended


def _descendants(ancestor: int) -> set[int]:
    """All processes below this one, those included that nobody has waited for."""
    parents: dict[int, int] = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError), open(f"/proc/{name}/stat", "rb") as file:
            parents[int(name)] = int(file.read().rpartition(b")")[2].split()[1])
    found: set[int] = set()
    more = {ancestor}
    while more:
        more = {process for process, parent in parents.items() if parent in more} - found
        found |= more
    return found


def _reaped() -> dict[int, int]:
    """Statuses of the children that have ended since the last call."""
    found: dict[int, int] = {}
    with suppress(ChildProcessError):  # there is none left
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            found[ended[0]] = ended[1]
    return found


def _end_as(status: int) -> None:
    """End this process as another one did."""
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # that of the other is enough
        with suppress(OSError):  # SIGKILL
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)
