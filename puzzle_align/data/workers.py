"""Work shared among processes: clean ones, which hold nothing of this process's devices or threads.

A worker is handed one item at a time and ends when this process does, however that ends: its
connection is closed then. A worker that ends of itself (out of memory, most often) is an error.
"""

import json
import os
import pickle
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Generator, Iterable, Iterator
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import Any, TypeVar

from puzzle_align.files.messages import ending, shown

T = TypeVar("T")
R = TypeVar("R")

# It finds the modules that are found here; in PYTHONPATH no folder may have a colon in its name.
_START = (
    "import json, sys; sys.path[:] = json.loads(sys.argv.pop());"
    f" from {__name__} import serve; serve(int(sys.argv.pop()))"
)
_AHEAD = 2  # items a worker that may be done, or under way, before an earlier one is
_PATIENCE_S = 5.0  # for a process that has closed its connection to be gone


def mapped(
    function: Callable[[T], R], items: Iterable[T], num_workers: int
) -> Generator[R, None, None]:
    """``function`` of every item, in order: of one worker here, else in that many processes.

    Processes end with the generator: close it.

    Args:
        function: can be pickled, and what it takes and returns, too.

    Raises:
        ValueError: that ``function`` raised; or one line, if a worker cannot be started, or is
            ended from without.
        RuntimeError: with the traceback of what else ``function`` raised in a process.
    """
    if num_workers == 1:
        yield from map(function, items)
        return
    work = pickle.dumps(function)
    team: list[_Worker] = []
    try:
        for _ in range(num_workers):
            team.append(_started())
        for worker in team:
            worker.send(work)
        yield from _in_order(team, iter(items))
    finally:
        for worker in team:
            worker.end()


def _in_order(team: list["_Worker"], items: Iterator[Any]) -> Iterator[Any]:
    """The results in the items' order; of those that come early, few are kept."""
    idle, busy = list(team), dict[Connection, tuple[_Worker, int]]()
    done = dict[int, Any]()
    num_given, num_out, is_over = 0, 0, False
    while True:
        while idle and not is_over and num_given < num_out + _AHEAD * len(team):
            try:
                item = next(items)
            except StopIteration:
                is_over = True
                break
            worker = idle.pop()
            worker.send(pickle.dumps(item))
            busy[worker.connection] = (worker, num_given)
            num_given += 1
        if num_out in done:
            yield done.pop(num_out)
            num_out += 1
        elif not busy:
            return
        else:
            for connection in wait(list(busy)):
                assert isinstance(connection, Connection)
                worker, number = busy.pop(connection)
                done[number] = worker.receive()
                idle.append(worker)


def _started() -> "_Worker":
    try:
        return _Worker()
    except OSError as error:
        raise ValueError(
            "data.num_proc: a process that tokenizes cannot be started "
            f"({shown(error.strerror or str(error))}): lower data.num_proc"
        ) from None


class _Worker:
    """A process that answers, seen from here."""

    def __init__(self) -> None:
        self.connection, theirs = Pipe()
        single = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
        path = json.dumps([str(folder) for folder in sys.path])
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _START, str(theirs.fileno()), path],
                env={**os.environ, **single},
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
            )

    def send(self, message: bytes) -> None:
        """Hand over what it waits for."""
        try:
            self.connection.send_bytes(message)
        except OSError:
            raise self._ending() from None

    def receive(self) -> Any:
        """What it answers."""
        try:
            is_answer, answer = pickle.loads(self.connection.recv_bytes())
        except (EOFError, OSError):
            raise self._ending() from None
        if not is_answer:
            raise answer
        return answer

    def end(self) -> None:
        """Whatever it does, end it."""
        self.connection.close()
        self._process.kill()
        self._process.wait()

    def _ending(self) -> Exception:
        try:
            code = self._process.wait(_PATIENCE_S)
        except subprocess.TimeoutExpired:
            return RuntimeError("a process that shares the work has closed its connection")
        if code >= 0:
            return RuntimeError(f"a process that shares the work {ending(code)}")
        return ValueError(
            f"data.num_proc: one of the processes that tokenize {ending(code)}, as the system does"
            " where memory runs out: lower data.num_proc"
        )


def serve(descriptor: int) -> None:
    """A worker's life: the function comes first, then items, each of which is answered."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the business of who started it
    connection = Connection(descriptor)
    try:
        function = pickle.loads(connection.recv_bytes())
        while True:
            item = pickle.loads(connection.recv_bytes())
            connection.send_bytes(pickle.dumps(_answer(function, item)))
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return  # who started it is done, or gone


def _answer(function: Callable[[Any], Any], item: Any) -> tuple[bool, Any]:
    """Whether there is a result, and that or the error to raise in its place."""
    try:
        return True, function(item)
    except MemoryError:
        os.kill(os.getpid(), signal.SIGKILL)  # as the system would have done
        raise
    except Exception as error:  # noqa: BLE001 - it is raised where the result is awaited
        frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
        raised_by = str(frames[-1].f_globals.get("__name__"))
        if isinstance(error, ValueError) and raised_by.split(".")[0] == __name__.split(".")[0]:
            return False, error  # for the user
        return False, RuntimeError(f"in a process that shares work:\n{traceback.format_exc()}")
