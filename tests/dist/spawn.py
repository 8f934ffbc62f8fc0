"""Gloo ranks for tests: real processes and process groups, one thread each, loopback, bounded time.

Ranks are forks of a process that has imported everything, and as good as new ones
(``tests.fork_server``). ``OMP_NUM_THREADS`` gives them more threads (``tests/kernels.sh``).
"""

import datetime
import os
import pickle
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Container, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests import fork_server

Process = fork_server.Process | subprocess.Popen


def run_ranks(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout: float = 500.0,
    fresh: bool = False,
) -> list:
    """Call ``fn(rank, world_size, *args)`` on ``world_size`` gloo ranks; return what each returned.

    Args:
        fn: by name; like ``args``, it is pickled.
        timeout: of the whole call and of the process group, in seconds.
        fresh: whether the ranks are new processes with imports of their own, as CUDA needs.

    Raises:
        RuntimeError: with the traceback of the first rank that failed, or on a time-out.
    """
    # The store is this process's, as a launcher's is the agent's: its port is nobody else's.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    calls = [
        (
            rank_environment(rank, world_size, store.port),
            partial(_on_rank, fn, rank, world_size, store.port, timeout),
        )
        for rank in range(world_size)
    ]
    return _run(calls, args, timeout, fresh)


def asked(request: pytest.FixtureRequest, *arguments: str) -> set[Any]:
    """Values of arguments in those tests of a fixture's module that are to run.

    A fixture computes all cases of its module together: so it leaves out those that no test needs.
    Several arguments give tuples.
    """
    found = set()
    for item in request.session.items:
        values = getattr(getattr(item, "callspec", None), "params", {})
        if item.path == request.path and all(name in values for name in arguments):
            of_item = [values[name] for name in arguments]
            found.add(tuple(of_item) if len(of_item) > 1 else of_item[0])
    return found


def marked(cases: Iterable[Any], slow: Container[Any]) -> list[Any]:
    """Parameters of tests, those in ``slow`` marked; a tuple has values of several arguments."""
    return [
        pytest.param(
            *(case if isinstance(case, tuple) else (case,)),
            marks=pytest.mark.slow if case in slow else (),
        )
        for case in cases
    ]


def run_alone(fn: Callable[..., Any], *args: Any, timeout: float = 200.0) -> Any:
    """Call ``fn(*args)`` in a process of its own, without process group; return what it returned.

    Raises:
        RuntimeError: as ``run_ranks``.
    """
    return _run([({}, fn)], args, timeout, fresh=False)[0]


def rank_environment(rank: int, world_size: int, port: int) -> dict[str, str]:
    """Environment that a launcher gives a rank, on this machine's loopback."""
    return {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "GLOO_SOCKET_IFNAME": "lo",
    }


def _run(
    calls: list[tuple[dict[str, str], Callable[..., Any]]], args: tuple, timeout: float, fresh: bool
) -> list:
    """Do each call, given its environment, with ``args`` in a process of its own."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        processes: list[Process] = []
        try:
            for number, (environment, fn) in enumerate(calls):
                call = folder / f"call{number}"
                work = (fn, args, folder, number)
                fork_server.write_call(call, _report, *work, environment=environment)
                start = _new_process if fresh else partial(fork_server.fork, number)
                processes.append(start(call))
            _wait(processes, folder, timeout)
        finally:
            for process in processes:
                process.kill()
                process.wait()
        return [pickle.loads((folder / f"result{n}").read_bytes()) for n in range(len(calls))]


def _new_process(call: Path) -> subprocess.Popen:
    code = "import sys, pathlib; from tests.fork_server import run_call as run"
    command = [sys.executable, "-c", f"{code}; run(pathlib.Path(sys.argv[1]))", str(call)]
    return subprocess.Popen(command, cwd=fork_server.ROOT)


def _wait(processes: list[Process], folder: Path, timeout: float) -> None:
    deadline = time.monotonic() + timeout
    while True:
        codes = [process.poll() for process in processes]
        failed = [r for r, code in enumerate(codes) if code not in (None, 0)]
        if failed:
            _raise_first(folder, failed)
        if None not in codes:
            return
        if time.monotonic() > deadline:
            raise RuntimeError(f"ranks did not finish within {timeout} s")
        time.sleep(0.02)


def _raise_first(folder: Path, failed: list[int]) -> None:
    time.sleep(0.2)  # let the rank that failed first finish writing
    errors = sorted(folder.glob("error*"), key=lambda path: path.stat().st_mtime_ns)
    if errors:
        raise RuntimeError(f"rank {errors[0].name[5:]} failed:\n{errors[0].read_text()}")
    raise RuntimeError(f"rank {failed[0]} died without a traceback")


def _report(fn: Callable[..., Any], args: tuple, folder: Path, number: int) -> None:
    """Leave in ``folder`` what ``fn(*args)`` returns, or the traceback of what it raises."""
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    try:
        (folder / f"result{number}").write_bytes(pickle.dumps(fn(*args)))
    except BaseException:
        (folder / f"error{number}").write_text(traceback.format_exc())
        raise


def _on_rank(
    fn: Callable[..., Any], rank: int, world_size: int, port: int, timeout: float, *args: Any
) -> Any:
    limit = datetime.timedelta(seconds=timeout)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=limit)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=limit)
    result = fn(rank, world_size, *args)
    dist.barrier()
    dist.destroy_process_group()
    return result
