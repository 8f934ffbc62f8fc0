"""Spawned gloo ranks for tests: real process groups, one thread each, loopback, bounded time."""

import datetime
import os
import pickle
import socket
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def run_ranks(fn: Callable[..., Any], world_size: int, *args: Any, timeout: float = 300.0) -> list:
    """Call ``fn(rank, world_size, *args)`` on ``world_size`` gloo ranks; return what each returned.

    Raises:
        RuntimeError: with the traceback of the first rank that failed, or on a time-out.
    """
    with tempfile.TemporaryDirectory() as folder:
        context = mp.get_context("spawn")
        port = _free_port()
        workers = [
            context.Process(
                target=_rank_main, args=(fn, rank, world_size, port, folder, timeout, args)
            )
            for rank in range(world_size)
        ]
        for worker in workers:
            worker.start()
        try:
            _wait(workers, Path(folder), timeout)
        finally:
            for worker in workers:
                worker.kill()
                worker.join()
        return [pickle.loads((Path(folder) / f"result{r}").read_bytes()) for r in range(world_size)]


def _wait(workers: list, folder: Path, timeout: float) -> None:
    deadline = time.monotonic() + timeout
    while any(worker.is_alive() for worker in workers):
        failed = [r for r, worker in enumerate(workers) if worker.exitcode not in (None, 0)]
        if failed:
            _raise_first(folder, failed)
        if time.monotonic() > deadline:
            raise RuntimeError(f"ranks did not finish within {timeout} s")
        time.sleep(0.05)
    failed = [r for r, worker in enumerate(workers) if worker.exitcode != 0]
    if failed:
        _raise_first(folder, failed)


def _raise_first(folder: Path, failed: list[int]) -> None:
    time.sleep(0.2)  # let the rank that failed first finish writing
    errors = sorted(folder.glob("error*"), key=lambda path: path.stat().st_mtime_ns)
    if errors:
        raise RuntimeError(f"rank {errors[0].name[5:]} failed:\n{errors[0].read_text()}")
    raise RuntimeError(f"rank {failed[0]} died without a traceback")


def _rank_main(
    fn: Callable[..., Any],
    rank: int,
    world_size: int,
    port: int,
    folder: str,
    timeout: float,
    args: tuple,
) -> None:
    os.environ.update(
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
        GLOO_SOCKET_IFNAME="lo",
    )
    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"tcp://127.0.0.1:{port}",
            rank=rank,
            world_size=world_size,
            timeout=datetime.timedelta(seconds=timeout),
        )
        result = fn(rank, world_size, *args)
        dist.barrier()
        dist.destroy_process_group()
        (Path(folder) / f"result{rank}").write_bytes(pickle.dumps(result))
    except BaseException:
        (Path(folder) / f"error{rank}").write_text(traceback.format_exc())
        raise


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
