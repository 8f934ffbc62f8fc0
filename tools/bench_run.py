"""Shared by the benches: an argument parser, ranks on this machine, JSON on stdout."""

import argparse
import json
import os
import socket
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any


def parser_of(doc: str | None) -> argparse.ArgumentParser:
    """Parser whose help shows a module's docstring."""
    summary, _, details = (doc or "").partition("\n\n")
    return argparse.ArgumentParser(
        description=summary, epilog=details, formatter_class=argparse.RawDescriptionHelpFormatter
    )


def show(results: Any) -> None:
    """Print the measurements as JSON."""
    json.dump(results, sys.stdout, indent=1)
    print()


def run_ranks(work: Callable[..., Any], num_ranks: int, *arguments: Any) -> Any:
    """Call ``work(world, *arguments)`` on CPU ranks of one thread each; return rank 0's result.

    ``work`` is a module's function and returns JSON values.

    Raises:
        torch.multiprocessing.ProcessRaisedException: with the traceback of a rank that failed.
    """
    import torch.multiprocessing as mp  # not above: the other tools' workers need no torch

    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        # Forks: this process has imported everything they need, and has not used torch yet.
        arguments_of_ranks = (work, num_ranks, _free_port(), result, arguments)
        mp.start_processes(_rank, arguments_of_ranks, nprocs=num_ranks, start_method="fork")
        return json.loads(result.read_text())


def _rank(
    rank: int,
    work: Callable[..., Any],
    num_ranks: int,
    port: int,
    result: Path,
    arguments: tuple[Any, ...],
) -> None:
    be_rank(
        lambda world: work(world, *arguments),
        result,
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=port,
        RANK=rank,
        LOCAL_RANK=rank,
        WORLD_SIZE=num_ranks,
        GLOO_SOCKET_IFNAME="lo",
    )


def be_rank(work: Callable[[Any], Any], result: Path, **environment: str | int) -> None:
    """Call ``work(world)`` as a CPU rank of one thread; rank 0 writes what it returns as JSON."""
    import torch

    from puzzle_align.runtime.groups.world import init_distributed, shutdown_distributed

    os.environ.update({name: str(value) for name, value in environment.items()})
    torch.set_num_threads(1)
    world = init_distributed("cpu", timeout_s=600.0)
    returned = work(world)
    if world.rank == 0:
        result.write_text(json.dumps(returned))
    shutdown_distributed()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
