"""Ranks on this machine for a tool that measures pipelines: started by it, not by torchrun."""

import json
import os
import socket
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp

from puzzle_align.runtime.groups.world import World, init_distributed, shutdown_distributed


def run_ranks(work: Callable[..., Any], num_ranks: int, *arguments: Any) -> Any:
    """Call ``work(world, *arguments)`` on CPU ranks of one thread each; what rank 0 returned.

    ``work`` is a module's function and returns JSON values.

    Raises:
        torch.multiprocessing.ProcessRaisedException: with the traceback of a rank that failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        # Forks: this process has imported all that they need, and computed nothing.
        given = (work, num_ranks, _free_port(), result, arguments)
        mp.start_processes(_rank, given, nprocs=num_ranks, start_method="fork")
        return json.loads(result.read_text())


def _rank(
    rank: int,
    work: Callable[..., Any],
    num_ranks: int,
    port: int,
    result: Path,
    arguments: tuple[Any, ...],
) -> None:
    os.environ.update(
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(num_ranks),
        GLOO_SOCKET_IFNAME="lo",
    )
    torch.set_num_threads(1)
    world: World = init_distributed("cpu", timeout_s=600.0)
    returned = work(world, *arguments)
    if rank == 0:
        result.write_text(json.dumps(returned))
    shutdown_distributed()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
