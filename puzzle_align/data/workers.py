"""Map a function over items in new processes, which inherit no devices or threads.

A worker gets one item at a time. It ends when this process ends, in any way, because that closes
its connection. A worker that ends earlier (most often out of memory) is an error.
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

# sys.path goes as an argument: in PYTHONPATH, a folder's name cannot contain a colon.
_START = (
    "import json, sys; sys.path[:] = json.loads(sys.argv.pop());"
    f" from {__name__} import serve; serve(int(sys.argv.pop()))"
)
_AHEAD = 2  # items per worker that may start before an earlier item is done
_PATIENCE_S = 5.0  # to wait for the end of a process that has closed its connection


def mapped(
    function: Callable[[T], R], items: Iterable[T], num_workers: int
) -> Generator[R, None, None]:
    """Yield ``function(item)`` of every item, in order. ``num_workers`` 1 runs in this process.

    Closing the generator ends the processes. Function, items and results must pickle.

    Raises:
        ValueError: raised by this package in ``function``; or one line, if a worker cannot be
            started or was killed.
        RuntimeError: with the traceback of any other exception of ``function``.
    """
    if num_workers == 1:
        yield from map(function, items)
        return
    work = pickle.dumps(function)
    workers: list[_Worker] = []
    try:
        for _ in range(num_workers):
            workers.append(_started())
        for worker in workers:
            worker.send(work)
        yield from _in_order(workers, iter(items))
    finally:
        for worker in workers:
            worker.end()


def _in_order(workers: list["_Worker"], items: Iterator[Any]) -> Iterator[Any]:
    """Yield results in the order of the items; holds few results that wait for earlier ones."""
    idle, busy = list(workers), dict[Connection, tuple[_Worker, int]]()
    done = dict[int, Any]()
    num_given, num_out, is_over = 0, 0, False
    while True:
        while idle and not is_over and num_given < num_out + _AHEAD * len(workers):
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
    """This process's handle of a worker."""

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
                start_new_session=True,  # signals to the rank's group are for the rank to handle
            )

    def send(self, message: bytes) -> None:
        """Send the function, or the next item."""
        try:
            self.connection.send_bytes(message)
        except OSError:
            raise self._ending() from None

    def receive(self) -> Any:
        """Wait for the item's result, or raise its error."""
        try:
            is_answer, answer = pickle.loads(self.connection.recv_bytes())
        except (EOFError, OSError):
            raise self._ending() from None
        if not is_answer:
            raise answer
        return answer

    def end(self) -> None:
        """Kill the process."""
        self.connection.close()
        self._process.kill()
        self._process.wait()

    def _ending(self) -> Exception:
        try:
            code = self._process.wait(_PATIENCE_S)
        except subprocess.TimeoutExpired:
            return RuntimeError("a process that tokenizes has closed its connection")
        if code >= 0:
            return RuntimeError(f"a process that tokenizes {ending(code)}")
        return ValueError(
            f"data.num_proc: one of the processes that tokenize {ending(code)}, as the system does"
            " where memory runs out: lower data.num_proc"
        )


def serve(descriptor: int) -> None:
    """Run a worker: receive the function, then items, and answer each."""
    connection = Connection(descriptor)
    try:
        function = pickle.loads(connection.recv_bytes())
        while True:
            item = pickle.loads(connection.recv_bytes())
            connection.send_bytes(pickle.dumps(_answer(function, item)))
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return  # the parent process is done, or has ended


def _answer(function: Callable[[Any], Any], item: Any) -> tuple[bool, Any]:
    """True and the result, or False and the error to raise."""
    try:
        return True, function(item)
    except MemoryError:
        os.kill(os.getpid(), signal.SIGKILL)  # one error for all ways to run out of memory
        raise
    except Exception as error:  # noqa: BLE001 - it is raised where the result is awaited
        frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
        raised_by = str(frames[-1].f_globals.get("__name__"))
        if isinstance(error, ValueError) and raised_by.split(".")[0] == __name__.split(".")[0]:
            return False, error  # for the user
        return False, RuntimeError(f"in a process that tokenizes:\n{traceback.format_exc()}")
