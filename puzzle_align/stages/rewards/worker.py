"""Worker process for a rank's reward functions: it isolates the rank from their side effects.

They may end the process, crash it, change its signal handlers, folder, random states or threads,
start processes, or never return: the rank is unaffected, and reports the failure in one line. One
process runs all functions of a rank for the whole job, so that their state lasts.

The process leads a session and a process group. The whole group (the functions' process pools and
programs) ends with it: the rank kills the group, and if the rank dies the kernel does.

Messages are pickled. The rank sends the functions' names, then a batch a call; the process answers
with a message for each function: its number and result, or the reason why the job cannot go on.
A request is written to a file that both have open, and its message is empty: sending a large
message would block, without a time-out, on a process that does not read.
"""

import asyncio
import faulthandler
import fcntl
import json
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any, NoReturn

from puzzle_align.config.sections.models import is_url
from puzzle_align.files.messages import ending
from puzzle_align.runtime.liveness.activity import unhurried
from puzzle_align.runtime.liveness.failure import CannotGoOn
from puzzle_align.stages.rewards.functions import (
    Completions,
    Result,
    RewardFunction,
    Signature,
    TrainerState,
    call_functions,
    load_reward_function,
)

# Set sys.path first, as multiprocessing's spawn does: this package may be on it.
_START = (
    "import json, sys; sys.path[:] = json.loads(sys.argv.pop());"
    " from puzzle_align.stages.rewards.worker import main; main()"
)
# Time limits, in seconds:
_START_S = 60.0  # start of an interpreter, on a busy machine
_END_S = 5.0  # functions' clean-up after the last call
_STACK_S = 0.5  # a process's dump of its stack
_GONE_S = 1.0  # end of a process that has closed its connection


class RewardWorker:
    """The rank's side of the process."""

    def __init__(self, names: Sequence[str], timeout: float | None) -> None:
        """Start the process; it imports the functions of these names.

        Args:
            timeout: of the import or the call of one function, in seconds; None: no limit.

        Raises:
            CannotGoOn: one line, if a function cannot be imported or called, or an import ends
                the process or takes too long.
        """
        self._names = names
        self._timeout = timeout
        # Both files are open as long as the process lives.
        self._request = tempfile.TemporaryFile()  # noqa: SIM115
        self._stack = tempfile.TemporaryFile()  # noqa: SIM115
        self._channel, self._process, lifeline = _start(
            self._request.fileno(), self._stack.fileno()
        )
        self._end = weakref.finalize(self, _end, self._channel, self._process, lifeline)
        self.signatures: list[Signature] = []
        with unhurried():  # has its own time-out
            self._send(([*names], timeout))
            for number in range(len(names)):
                self.signatures += self._answers([number], 0.0 if number else _START_S).values()

    def __call__(self, completions: Completions, state: TrainerState) -> list[Result]:
        """Call every function.

        Raises:
            CannotGoOn: one line, if a function fails, ends the process, takes too long, or does
                not return n rewards.
        """
        at_once = [number for number, s in enumerate(self.signatures) if s.is_async]
        turns = [[number] for number, s in enumerate(self.signatures) if not s.is_async]
        results: dict[int, Result] = {}
        with unhurried():
            self._send((completions, state))
            for numbers in (*turns, at_once):
                results |= self._answers(numbers)
        return [results[number] for number in sorted(results)]

    def close(self) -> None:
        """End the process and its group."""
        self._end()

    def _send(self, request: object) -> None:
        self._request.seek(0)
        pickle.dump(request, self._request)
        self._request.flush()
        with suppress(OSError):  # the process has ended: ``_answers`` reports it
            self._channel.send_bytes(b"")

    def _answers(self, numbers: Sequence[int], grace: float = 0.0) -> dict[int, Any]:
        """Receive answers of concurrent functions; ``grace`` seconds are added to the time-out."""
        deadline = None if self._timeout is None else time.monotonic() + self._timeout + grace
        answers: dict[int, Any] = {}
        while waiting := [number for number in numbers if number not in answers]:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            try:
                if not self._channel.poll(left):
                    self._process.send_signal(signal.SIGQUIT)  # dumps its stack
                    time.sleep(_STACK_S)
                    why = f"no answer within {self._timeout} s; fix it, or raise reward.timeout"
                    self._fail(waiting, why)
                answer = self._channel.recv()
            except (EOFError, OSError):
                self._fail(waiting, f"{self._ending()}: look at what it calls, and at the memory")
            if isinstance(answer, CannotGoOn):
                self.close()
                raise answer
            answers |= answer
        return answers

    def _ending(self) -> str:
        """Describe the end of a process that has closed its connection."""
        try:
            return f"its process {ending(self._process.wait(_GONE_S))}"
        except subprocess.TimeoutExpired:
            return "its process has closed its connection to the rank"

    def _fail(self, numbers: Sequence[int], why: str) -> NoReturn:
        """End the process; raise CannotGoOn with these functions' names."""
        _kill(self._process)
        self.close()
        names = ", ".join(self._names[number] for number in numbers)
        places = ", ".join(self.signatures[n].place for n in numbers if n < len(self.signatures))
        self._stack.seek(0)
        details = self._stack.read().decode(errors="replace")
        where = f" ({places})" if places else ""
        if is_url(self._names[numbers[0]]):
            raise CannotGoOn(f"reward.url={names}: {why}", details)
        raise CannotGoOn(f"reward.function={names}: {why}{where}", details)


def main() -> None:
    """Serve a rank until it closes the channel.

    ``sys.argv`` ends with the descriptors of the channel, the rank's lifeline, the file of requests
    and the file for the stack of a crash.
    """
    descriptors = channel_number, lifeline, request, stack = [int(n) for n in sys.argv[-4:]]
    del sys.argv[-4:]
    for descriptor in descriptors:  # programs that functions start do not inherit them
        os.set_inheritable(descriptor, False)
    channel = Connection(channel_number)
    # Else the channel would stay open until the process's forks end, too.
    os.register_at_fork(after_in_child=channel.close)
    _end_group_with(lifeline)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # the rank may ignore it
    signal.signal(signal.SIGINT, signal.default_int_handler)
    faulthandler.enable(stack, all_threads=False)
    faulthandler.register(signal.SIGQUIT, stack, all_threads=False)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    _serve(channel, request)


def _end_group_with(lifeline: int) -> None:
    """Make the kernel kill this process's group when the rank's end of the pipe is closed.

    PR_SET_PDEATHSIG would kill only this process, and a Python handler or thread would wait for
    functions that hold the interpreter.
    """
    if hasattr(fcntl, "F_SETSIG"):  # Linux
        fcntl.fcntl(lifeline, fcntl.F_SETOWN, -os.getpgrp())
        fcntl.fcntl(lifeline, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) | os.O_ASYNC)


def _serve(channel: Connection, request: int) -> None:
    """Import functions, then call them, batch by batch, until one fails."""

    def receive() -> Any:
        channel.recv_bytes()
        with open(request, "rb", closefd=False) as file:  # reopened: nothing is buffered
            file.seek(0)
            return pickle.load(file)

    def answer(content: CannotGoOn | dict[int, Any]) -> None:
        with suppress(ValueError):  # a function may have closed it
            sys.stdout.flush()
        channel.send(content)

    functions: list[RewardFunction] = []
    loop = asyncio.new_event_loop()
    try:
        names, timeout = receive()
        for number, name in enumerate(names):
            functions.append(load_reward_function(name, timeout))
            answer({number: functions[-1].signature})
        while True:
            completions, state = receive()
            for number, result in call_functions(functions, completions, state, loop):
                answer({number: result})
    except CannotGoOn as fault:
        answer(fault)
    except EOFError:  # the rank has no more to ask
        return


def _start(request: int, stack: int) -> tuple[Connection, subprocess.Popen[bytes], int]:
    """Start the process; return the rank's end of the channel, the process, and the lifeline."""
    rank_end, process_end = Pipe()
    lifeline, held = os.pipe()
    descriptors = (process_end.fileno(), lifeline, request, stack)
    path = json.dumps([str(folder) for folder in sys.path])
    process = subprocess.Popen(
        [sys.executable, "-c", _START, *map(str, descriptors), path],
        stdin=subprocess.DEVNULL,
        pass_fds=descriptors,
        start_new_session=True,  # Ctrl-C goes to the rank only
    )
    process_end.close()
    os.close(lifeline)
    return rank_end, process, held


def _end(channel: Connection, process: subprocess.Popen[bytes], lifeline: int) -> None:
    """Let the process end by itself, then kill the rest of its group."""
    channel.close()
    with suppress(subprocess.TimeoutExpired):
        process.wait(_END_S)
    _kill(process)
    os.close(lifeline)


def _kill(process: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    with suppress(subprocess.TimeoutExpired):  # it hangs in the kernel, and cannot be killed
        process.wait(_END_S)
