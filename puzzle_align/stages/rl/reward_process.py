"""A rank's reward functions in a process of their own, which takes whatever they do to a process.

They may end it, crash it, change its signal handlers, folder, random states or threads, fork, start
processes of their own, or never come back: the rank stays as it is, and says in one line what has
happened. One process serves all functions of a rank for the whole job, so that they keep what they
keep. When it ends, or the rank does, everything that they have started ends (``reward_guard``).
"""

import json
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import IO, Any, NoReturn

import numpy as np

from puzzle_align.files.messages import ending
from puzzle_align.runtime.liveness.activity import unhurried
from puzzle_align.runtime.liveness.failure import CannotGoOn
from puzzle_align.stages.rl.reward_calls import Completions, Judged, TrainerState
from puzzle_align.stages.rl.reward_function import Signature

# As multiprocessing's own spawn: the path first, which may lead to this package.
_START = (
    "import json, sys; sys.path[:] = json.loads(sys.argv.pop());"
    " from puzzle_align.stages.rl.reward_child import main; main()"
)
_START_S = 60.0  # what an interpreter may take to start, on a machine with other work
_END_S = 5.0  # what functions may take to clean up after the last call
_STACK_S = 0.5  # what a process may take to write down where it is
_GONE_S = 1.0  # what one that has lost its connection may take to end, if it does


class RewardProcess:
    """The process, as the rank sees it."""

    def __init__(self, names: Sequence[str], timeout: float | None) -> None:
        """Start it, and have it find the functions of these names, one at least.

        Args:
            timeout: of the import or the call of a function, in seconds; None: none.

        Raises:
            CannotGoOn: where an import ends the process or takes too long.
        """
        self._names = names
        self._timeout = timeout
        self._stack = tempfile.TemporaryFile()  # noqa: SIM115 - open as long as the process lives
        self._channel, self._process = _start(self._stack)
        self._end = weakref.finalize(self, _end, self._channel, self._process)
        self._running: dict[int, float] = {}  # by a function's number, since when
        # What each function takes, or why it cannot be called.
        self.loaded: list[Signature | CannotGoOn] = []
        for found in self._ask([*names], grace=_START_S):
            self.loaded.append(_fault(found) if "fault" in found else _signature(found))

    def __call__(self, completions: Completions, state: TrainerState) -> Judged:
        """Have every function called; see ``CalledFunctions``.

        Raises:
            CannotGoOn: one line, if a function fails, ends the process or takes too long, or
                returns anything but n rewards.
        """
        answer = self._ask((completions, state))
        if "fault" in answer:
            raise _fault(answer)
        rewards = np.array(answer.pop("rewards"), dtype=np.float64)
        return Judged(rewards, **answer)

    def close(self) -> None:
        """End the process, and all that it has started."""
        self._end()

    def _ask(self, request: object, grace: float = 0.0) -> Any:
        """The answer to a request; ``grace``: seconds that the process may take to come to it.

        The time-out of it is ``reward.timeout``: other ranks may wait meanwhile.
        """
        with unhurried():
            return self._answer(request, grace)

    def _answer(self, request: object, grace: float) -> Any:
        self._running.clear()
        message = pickle.dumps(request)
        # Beside what comes below: a process that reads no more must not hold up the rank for ever.
        threading.Thread(target=self._send, args=(message,), daemon=True).start()
        asked = time.monotonic() + grace
        while True:
            said = self._receive(min(self._running.values(), default=asked))
            if "answer" in said:
                return said["answer"]
            asked = time.monotonic()
            if "running" in said:
                self._running[said["running"]] = asked
            else:
                del self._running[said["done"]]

    def _send(self, message: bytes) -> None:
        with suppress(OSError):  # it has ended, which is told where it is read from
            self._channel.send_bytes(message)

    def _receive(self, since: float) -> dict[str, Any]:
        """The next message of a process that has been at its work since then."""
        left = None if self._timeout is None else max(0.0, since + self._timeout - time.monotonic())
        ended = [os.pidfd_open(self._process.pid)] if hasattr(os, "pidfd_open") else []
        try:
            if not wait([self._channel, *ended], left):
                self._fail(f"no answer within {self._timeout} s; mend it, or raise reward.timeout")
        finally:
            for descriptor in ended:
                os.close(descriptor)
        # Anything else than a message: it has ended, or a function has meddled with the channel.
        with suppress(EOFError, OSError, ValueError):
            if not ended or self._channel.poll():
                return json.loads(self._channel.recv_bytes())
        return self._fail("")

    def _fail(self, what: str) -> NoReturn:
        """End the process and say why; without a reason it has ended by itself."""
        all_of_them = range(len(self._names))  # between two calls: any may have done it
        names = ", ".join(self._names[number] for number in sorted(self._running) or all_of_them)
        if what:
            self._process.send_signal(signal.SIGQUIT)  # so that it writes down where it is
            time.sleep(_STACK_S)
        else:
            what = f"its process {_ending(self._process)}: look at what it calls, and at the memory"
        _kill(self._process)
        self.close()
        self._stack.seek(0)
        details = self._stack.read().decode(errors="replace")
        raise CannotGoOn(f"reward.function={names}: {what}", details)


def _start(stack: IO[bytes]) -> tuple[Connection, subprocess.Popen[bytes]]:
    ours, theirs = Pipe()
    path = json.dumps([str(folder) for folder in sys.path])
    numbers = [str(number) for number in (os.getpid(), theirs.fileno(), stack.fileno())]
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-c", _START, *numbers, path],
            stdin=subprocess.DEVNULL,
            pass_fds=[theirs.fileno(), stack.fileno()],
            start_new_session=True,  # Ctrl-C is ours
        )
    return ours, process


def _end(channel: Connection, process: subprocess.Popen[bytes]) -> None:
    """Let the process end by itself, if it still lives, else end it."""
    channel.close()
    with suppress(subprocess.TimeoutExpired):
        process.wait(_END_S)
    _kill(process)


def _kill(process: subprocess.Popen[bytes]) -> None:
    """End the process if it still lives, and with it, by its guard, all that it has started."""
    process.terminate()
    try:
        process.wait(_END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _ending(process: subprocess.Popen[bytes]) -> str:
    """How a process has ended."""
    try:
        code = process.wait(_GONE_S)
    except subprocess.TimeoutExpired:
        return "has spoilt its connection to the rank"
    return ending(code)


def _fault(answer: dict[str, str]) -> CannotGoOn:
    return CannotGoOn(answer["fault"], answer["details"])


def _signature(found: dict[str, Any]) -> Signature:
    lists = {name: tuple(found[name]) for name in ("names", "needed")}
    return Signature(**{**found, **lists})
