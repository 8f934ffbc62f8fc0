"""Ranks for tests: every call's are as good as new, fail as they should, and outlive no session."""

import logging
import os
import random
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path

import megatron.core.tensor_parallel.random as megatron_random
import numpy as np
import psutil
import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state

from puzzle_align.models import cpu
from puzzle_align.runtime.groups import collectives
from puzzle_align.runtime.liveness import watch
from tests.dist.spawn import run_alone, run_ranks
from tests.fork_server import NUM_SERVERS, ROOT

KEY = "PUZZLE_ALIGN_SPAWN_TEST"


def _state() -> dict[str, object]:
    """What a test may have changed in a process for good."""
    return {
        "environment": os.environ.get(KEY),
        "folder": os.getcwd(),
        "path": list(sys.path),
        "dtype": torch.get_default_dtype(),
        "threads": torch.get_num_threads(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "current_device": torch.cuda.current_device.__module__,
        "patched": cpu._installed,
        "tracker": bool(megatron_random.get_cuda_rng_tracker().get_states()),
        "memory buffer": parallel_state._GLOBAL_MEMORY_BUFFER,
        "groups": collectives.patient_group.cache_info().currsize,
        "watch": watch.current(),
        "warnings": [item[:3] for item in warnings.filters if item[0] == "error"],
        "handlers": len(logging.getLogger().handlers),
        "level": logging.getLogger("puzzle_align").level,
        "signal": signal.getsignal(signal.SIGTERM),
        "attribute": hasattr(torch, KEY),
    }


def _found_and_spoiled(rank: int, world_size: int, folder: Path) -> dict[str, object]:
    found = _state()
    os.environ[KEY] = "1"
    sys.path.append(KEY)
    os.chdir(folder)
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(3)
    torch.use_deterministic_algorithms(True)
    cpu.install_cpu_patches()
    megatron_random.get_cuda_rng_tracker().add(KEY, 7)
    parallel_state._set_global_memory_buffer()
    collectives.patient_group()
    watch._watch = watch.Watch(rank, world_size, 60.0, torch.device("cpu"))
    warnings.simplefilter("error")
    logging.basicConfig(level=logging.DEBUG)
    logging.getLogger("puzzle_align").setLevel(logging.DEBUG)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    setattr(torch, KEY, 1)
    spoiled = _state()
    assert [name for name, value in spoiled.items() if value == found[name]] == []
    return found


def test_nothing_is_left_of_the_call_before(tmp_path: Path) -> None:
    first, second, new = (
        run_ranks(_found_and_spoiled, 1, tmp_path, fresh=fresh) for fresh in (False, False, True)
    )
    assert first == second == new


def _surroundings(_rank: int, _world_size: int) -> tuple[str | None, str, bool]:
    return os.environ.get(KEY), os.getcwd(), KEY in sys.path


def test_ranks_have_the_caller_s_surroundings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in ("1", "2"):
        folder = tmp_path / number
        folder.mkdir()
        monkeypatch.setenv(KEY, number)
        monkeypatch.chdir(folder)
        monkeypatch.syspath_prepend(KEY)
        assert run_ranks(_surroundings, 2) == [(number, str(folder), True)] * 2


def _said(rank: int, _world_size: int) -> None:
    os.write(1 + rank, f"{rank}".encode())


def test_what_ranks_say_is_heard(capfd: pytest.CaptureFixture[str]) -> None:
    run_ranks(_said, 2)
    assert capfd.readouterr() == ("0", "1")


def _draws(_rank: int, _world_size: int) -> tuple[int, float, float, float]:
    return hash(KEY), random.random(), float(np.random.rand()), torch.rand(()).item()


def test_neighbours_draw_what_separate_processes_draw() -> None:
    """All apart; of the order of sets of strings, as many as there are servers."""
    hashes, *draws = zip(*run_ranks(_draws, 4), *run_ranks(_draws, 4), strict=True)
    assert hashes[0] != hashes[1]
    assert len(set(hashes)) == NUM_SERVERS
    assert [len(set(drawn)) for drawn in draws] == [8, 8, 8]


def _raise(rank: int, _world_size: int) -> None:
    if rank == 1:
        raise ValueError("no such row")
    dist.barrier()


def _die(rank: int, _world_size: int) -> None:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(600)


def _hang(rank: int, _world_size: int, folder: Path) -> None:
    (folder / str(rank)).write_text(str(os.getpid()))
    time.sleep(600)


def _sum(rank: int, _world_size: int) -> float:
    total = torch.tensor(float(rank))
    dist.all_reduce(total)
    return total.item()


def test_failures_are_told_and_the_next_call_works(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"(?s)^rank 1 failed:.*in _raise.*no such row\n$"):
        run_ranks(_raise, 2)
    with pytest.raises(RuntimeError, match=r"^rank 1 died without a traceback$"):
        run_ranks(_die, 2)
    with pytest.raises(RuntimeError, match=r"^ranks did not finish within 5\.0 s$"):
        run_ranks(_hang, 2, tmp_path, timeout=5.0)
    for rank in range(2):
        assert not psutil.pid_exists(int((tmp_path / str(rank)).read_text()))
    assert run_ranks(_sum, 3) == [3.0] * 3


def test_a_call_without_ranks_returns_or_raises() -> None:
    assert run_alone(os.path.join, "a", "b") == "a/b"
    with pytest.raises(RuntimeError, match=r"(?s)^rank 0 failed:.*ZeroDivisionError"):
        run_alone(divmod, 1, 0)


SESSION = """
import pathlib, sys, time
from tests import fork_server

call = pathlib.Path(sys.argv[1]) / "call"
fork_server.write_call(call, time.sleep, 600, environment={})
server = fork_server.Server(modules=())
server.fork(call, (1, 2))
print("started", flush=True)
if sys.argv[2] == "is killed":
    time.sleep(600)
"""


def _marked(mark: str) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(KEY) == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            continue
    return found


@pytest.mark.parametrize(("way", "code"), [("ends", 0), ("is killed", -signal.SIGKILL)])
def test_nothing_outlives_the_session(tmp_path: Path, way: str, code: int) -> None:
    mark = str(tmp_path)
    session = subprocess.Popen(
        [sys.executable, "-c", SESSION, str(tmp_path), way],
        cwd=ROOT,
        env={**os.environ, KEY: mark},
        stdout=subprocess.PIPE,
    )
    assert session.stdout is not None
    with session.stdout as said:
        assert said.readline() == b"started\n"
        if way == "is killed":
            assert len(_marked(mark)) == 3  # with the server and its process
            session.kill()
    assert session.wait(60) == code
    psutil.wait_procs(_marked(mark), timeout=10)
    assert _marked(mark) == []
