"""Processes that start at once and are as good as new: forks of one that has imported everything.

torch, transformers and Megatron take seconds to import. A server imports them once a test session,
and computes nothing: a fork of it is what a new process is after the same imports. So nothing has
to be put back between two tests: neither patches and caches nor groups, filters and handlers.
Workers of a session (pytest-xdist) share its servers: each of them talks to a fork of its own.

Invariants:
- a process has the caller's environment, folder, ``sys.path`` and outputs as they are at the call;
  its environment is also what ``/proc`` shows of it;
- servers have one thread, which is all that a fork takes along;
- its random generators are seeded anew, as at their import;
- servers take turns, so that neighbours differ in what Python draws once, at its start (they
  iterate over a set of strings in different orders), as the ranks of a job do;
- servers end with the test session, however it ends, and their processes with them.

A process that needs CUDA must be new (``fresh`` in ``tests.dist.spawn``): imports may ask for
devices, and a fork of a process that did cannot use them.
"""

import ctypes
import gc
import importlib
import math
import os
import pickle
import pkgutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import cache
from multiprocessing import get_context
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
NUM_SERVERS = 2
# With ".*": a package and all that is in it.
IMPORTED = (
    "puzzle_align.*",
    "pytest",
    "psutil",
    "numpy",
    "tests.dist.spawn",
    "torch.distributed.run",
    "transformers.models.auto.modeling_auto",
)
_PR_SET_PDEATHSIG = 1
_ENVIRONMENT_BYTES = 65536  # more than a call's environment takes
_MESSAGE_BYTES = 4096
_ADDRESSES = "PUZZLE_ALIGN_FORK_SERVERS"  # paths of sockets, in the session's environment
_KIND = (socket.AF_UNIX, socket.SOCK_SEQPACKET)
_started: list[Any] = []  # what ends or is removed with this process


class Call(NamedTuple):
    """Call in a process of its own; ``work`` is pickled ``(function, arguments)``."""

    environment: dict[str, str]
    folder: str
    path: list[str]
    work: bytes


def write_call(
    file: Path, function: Callable[..., Any], *args: Any, environment: Mapping[str, str]
) -> None:
    """Write the call of ``function``, with ``environment`` on top of this process's own."""
    work = pickle.dumps((function, args))
    file.write_bytes(pickle.dumps(Call({**os.environ, **environment}, os.getcwd(), sys.path, work)))


def run_call(file: Path) -> None:
    """Do what ``write_call`` wrote, in a process that is there for it."""
    call: Call = pickle.loads(file.read_bytes())
    set_environment(call.environment)
    os.chdir(call.folder)
    sys.path[:] = call.path
    function, args = pickle.loads(call.work)  # which may import the test's module
    function(*args)


def set_environment(environment: Mapping[str, str]) -> None:
    """Give this process an environment, for itself and for those who look at ``/proc``."""
    os.environ.clear()
    os.environ.update(environment)
    # Nothing points to where the kernel put the first one any more. Of a process that was started
    # for a call, not forked, /proc shows what fits there.
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = int(fields[47]), int(fields[48])  # env_start, env_end
    text = b"".join(os.fsencode(f"{name}={value}") + b"\0" for name, value in environment.items())
    ctypes.memmove(start, text[: end - start].ljust(end - start, b"\0"), end - start)


class Process:
    """A forked process, seen from the test session; as ``subprocess.Popen``, as far as it goes."""

    def __init__(self, server: "Server", pid: int) -> None:
        self._server = server
        self.pid = pid
        self._code: int | None = None

    def poll(self) -> int | None:
        """Its exit code, or minus the signal that ended it; None as long as it lives."""
        if self._code is None:
            self._code = self._server.exit_code(self.pid)
        return self._code

    def send_signal(self, number: int) -> None:
        """Send a signal, unless it has ended."""
        self._server.ask(f"signal {self.pid} {number}")

    def kill(self) -> None:
        """End it, unless it has ended."""
        self.send_signal(signal.SIGKILL)

    def wait(self, timeout: float = math.inf) -> int:
        """Wait for its end; its exit code.

        Raises:
            subprocess.TimeoutExpired: after so many seconds.
        """
        deadline = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("forked process", timeout)
            time.sleep(0.005)
        return code


def start_servers() -> None:
    """Start this session's servers, which end with this process.

    They import while the session goes on, and are called as soon as they have.
    """
    search = filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(search),
        "ROOM": " " * _ENVIRONMENT_BYTES,  # see set_environment
    }
    folder = tempfile.TemporaryDirectory(prefix="fork_servers")  # that nobody else may enter
    _started.append(folder)
    addresses = [f"{folder.name}/{number}" for number in range(NUM_SERVERS)]
    for address in addresses:
        own, theirs = socket.socketpair()
        with theirs, socket.socket(*_KIND) as listening:
            listening.bind(address)
            listening.listen()
            descriptors = theirs.fileno(), listening.fileno()
            server = subprocess.Popen(
                [sys.executable, "-m", "tests.fork_server", *map(str, descriptors)],
                env=environment,
                stdin=subprocess.DEVNULL,
                pass_fds=descriptors,
                start_new_session=True,  # Ctrl-C is the test session's business
            )
        _started.extend((server, own))
    os.environ[_ADDRESSES] = " ".join(addresses)


class Server:
    """This process's fork of one that has imported everything, seen from the test session."""

    def __init__(self, address: str) -> None:
        self._socket = socket.socket(*_KIND)
        self._socket.connect(address)
        self._ended: dict[int, int] = {}

    def fork(self, call: Path, outputs: tuple[int, int]) -> Process:
        """Start the call that is written in ``call``; stdout and stderr are these descriptors."""
        socket.send_fds(self._socket, [f"run {call}".encode()], outputs)
        while len(words := self._receive()) != 1:
            self._note(words)
        return Process(self, words[0])

    def ask(self, what: str) -> None:
        """Send a message that has no answer."""
        self._socket.send(what.encode())

    def exit_code(self, pid: int) -> int | None:
        """Exit code of an ended process, once; None as long as it lives."""
        while wait([self._socket], timeout=0):
            self._note(self._receive())
        return self._ended.pop(pid, None)

    def _note(self, words: list[int]) -> None:
        pid, code = words
        self._ended[pid] = code

    def _receive(self) -> list[int]:
        message = self._socket.recv(_MESSAGE_BYTES)
        if not message:
            raise RuntimeError("a server of processes has ended")
        return [int(word) for word in message.split()]


@cache
def servers() -> tuple[Server, ...]:
    """The servers of this test session; the first call starts them if nobody has."""
    if _ADDRESSES not in os.environ:
        start_servers()
    return tuple(map(Server, os.environ[_ADDRESSES].split()))


def fork(number: int, call: Path, outputs: tuple[int, int] = (1, 2)) -> Process:
    """Start the call written in ``call`` as one of several, from 0; see ``Server.fork``."""
    return servers()[number % NUM_SERVERS].fork(call, outputs)


def _serve_all(starter: socket.socket, listening: socket.socket) -> None:
    """Give each caller a fork of this process, until the starter is gone."""
    while starter not in wait([starter, listening]):
        caller, _ = listening.accept()
        with caller:
            if not os.fork():
                starter.close()
                listening.close()
                _serve(caller)
                os._exit(0)


def _serve(caller: socket.socket) -> None:
    """Fork whenever the test session asks, and tell it how every process ended."""
    running: dict[int, Any] = {}  # by a descriptor of the process, which no child of it can hold
    while True:
        for ready in wait([caller, *running]):
            if isinstance(ready, int):
                process = running.pop(ready)
                os.close(ready)
                process.join()
                caller.send(f"{process.pid} {process.exitcode}".encode())
            elif not _answer(caller, running):
                for process in running.values():
                    process.kill()
                return


def _answer(caller: socket.socket, running: dict[int, Any]) -> bool:
    """Do what the session asks for; False if it is gone."""
    try:
        message, descriptors, _, _ = socket.recv_fds(caller, _MESSAGE_BYTES, 2)
    except ConnectionResetError:
        return False
    match message.decode().split(maxsplit=1):
        case ["run", file]:
            process = get_context("fork").Process(target=_child, args=(file, descriptors, caller))
            process.start()
            for descriptor in descriptors:
                os.close(descriptor)
            assert process.pid is not None
            running[os.pidfd_open(process.pid)] = process
            caller.send(f"{process.pid}".encode())
        case ["signal", words]:
            pid, number = map(int, words.split())
            if any(process.pid == pid for process in running.values()):  # not yet waited for
                os.kill(pid, number)
        case _:
            return False
    return True


def _child(file: str, descriptors: list[int], caller: socket.socket) -> None:
    server = os.getppid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != server:
        os._exit(1)
    caller.close()
    for target, descriptor in enumerate(descriptors, start=1):
        os.dup2(descriptor, target)
        os.close(descriptor)
    draw_seeds()
    run_call(Path(file))


def draw_seeds() -> None:
    """Seed at random what is so at import (Python's own generator sees to that itself)."""
    if "torch" in sys.modules:
        import numpy
        import torch

        numpy.random.seed()
        torch.default_generator.seed()


def _import(name: str) -> None:
    module = importlib.import_module(name.removesuffix(".*"))
    if name.endswith(".*"):
        for found in pkgutil.walk_packages(module.__path__, f"{module.__name__}."):
            importlib.import_module(found.name)


if __name__ == "__main__":
    gc.disable()  # imports leave next to nothing to collect
    for wanted in IMPORTED:
        _import(wanted)
    assert len(os.listdir("/proc/self/task")) == 1, "an import started a thread: no forks of this"
    gc.collect()
    gc.freeze()  # so that children need not copy what their collectors would touch
    gc.enable()
    _serve_all(*(socket.socket(fileno=int(number)) for number in sys.argv[1:]))
