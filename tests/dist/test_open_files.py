"""The limit of open files is raised to what a job's groups need; where it cannot be, one line."""

import os
import resource
from pathlib import Path

import psutil
import pytest
import torch

from puzzle_align.config.load import find_config, load_file
from puzzle_align.layout.groups import groups_of
from puzzle_align.runtime.groups.collectives import wait_for_all
from puzzle_align.runtime.groups.limits import allow_open_files, files_needed
from puzzle_align.runtime.groups.world import World, init_distributed, shutdown_distributed
from puzzle_align.stages.ppo import open_trainer
from tests.dist.spawn import run_alone, run_ranks
from tests.jobs import resolved

PLAN = [
    *(f"actor.parallel.{n}_model_parallel_size=2" for n in ("pipeline", "tensor")),
    "generation.parallel.tensor_model_parallel_size=2",
]


def test_groups_have_as_many_files_as_are_counted(tmp_path: Path) -> None:
    for counted, opened in run_ranks(_count, 8, tmp_path):
        assert counted == opened


def _count(rank: int, world_size: int, folder: Path) -> tuple[int, int]:
    """Files that the groups of a job are said to open, and that they open."""
    world = World(rank, world_size, torch.device("cpu"))
    config = load_file(find_config("ppo_tiny"), [*PLAN, f"output_dir={folder}"])
    wait_for_all(world.device)
    before = _num_sockets()
    trainer = open_trainer(resolved(config, world.size), world)
    wait_for_all(world.device)
    opened = _num_sockets() - before
    sizes = [len(g.ranks) for g in groups_of(trainer.plan, rank) if len(g.ranks) < world_size]
    return files_needed(world_size, 0, sizes) - files_needed(world_size, 0), opened


def _num_sockets() -> int:
    """Open files of this process that are in no folder: sockets, and what waits for them.

    But for those to processes of its own (Unix sockets, pipes), which call the reward functions.
    """
    children = {link for child in psutil.Process().children() for link in _links(child.pid)}
    to_children = len(psutil.Process().net_connections("unix"))
    links = [link for link in _links(os.getpid()) if not link.startswith("/")]
    return sum(not (link.startswith("pipe:") and link in children) for link in links) - to_children


def _links(pid: int) -> list[str]:
    """The files that a process has open."""
    folder = Path(f"/proc/{pid}/fd")
    return [os.readlink(file) for file in folder.iterdir() if file.is_symlink()]


def test_a_low_soft_limit_is_raised_and_a_low_hard_one_told() -> None:
    soft, message = run_alone(_under_limits)
    assert soft == 200
    assert message == (
        "this job has about 201 files open on a rank, but the limit is 200: raise the hard limit "
        "(ulimit -Hn; docker run --ulimit nofile=...; LimitNOFILE= of slurmd)"
    )


def _under_limits() -> tuple[int, str]:
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, 200))
    allow_open_files(200)
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    with pytest.raises(ValueError) as raised:
        allow_open_files(201)
    return soft, str(raised.value)


def test_a_job_joins_under_a_soft_limit_that_its_groups_exceed() -> None:
    assert run_alone(_join) == 256


def _join() -> int:
    resource.setrlimit(resource.RLIMIT_NOFILE, (16, 256))
    os.environ["WORLD_SIZE"] = "1"
    init_distributed("cpu", 60)
    shutdown_distributed()
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]
