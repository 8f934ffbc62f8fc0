"""A rank with a slow disk is not taken for one that hangs, and others wait for it past time-outs.

Of two ranks the actor's reads and writes slowly, for longer than any time-out; the critic's waits.
"""

import datetime
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import FileSystemReader

from puzzle_align.config.load import find_config, load_file
from puzzle_align.config.saved import open_checkpoint
from puzzle_align.models.hf.sources import RandomSource
from puzzle_align.runtime.checkpoint import writer as checkpoint_writer
from puzzle_align.runtime.checkpoint.models import load_checkpoint, save_checkpoint
from puzzle_align.runtime.groups.collectives import wait_for_all
from puzzle_align.runtime.groups.world import World
from puzzle_align.runtime.liveness import watch
from puzzle_align.stages.ppo import open_trainer
from tests.dist.spawn import run_ranks
from tests.jobs import resolved

TIMEOUT_S = 3.0
LIMIT = datetime.timedelta(seconds=4.5)  # of the groups
NUM_SLOW, SLOW_S = 9, 0.8  # longer than both time-outs, and than the watch takes to be sure
APART = ['actor.ranks="0"', 'critic.ranks="1"', "data.cache_dir=null"]


def test_others_wait_for_a_rank_that_loads_or_saves_slowly(tmp_path: Path) -> None:
    slow = run_ranks(_load_and_save, 2, tmp_path, timeout=100.0)[0]
    assert slow == {"fill": NUM_SLOW, "save": NUM_SLOW, "load": NUM_SLOW}


def _load_and_save(rank: int, world_size: int, folder: Path) -> dict[str, int]:
    """How much of each the actor's rank did slowly."""
    world = World(rank, world_size, torch.device("cpu"), LIMIT)
    config = load_file(find_config("ppo_tiny"), [*APART, f"output_dir={folder}"])
    wait_for_all(world.device)
    dist.distributed_c10d._set_pg_timeout(LIMIT, dist.group.WORLD)
    watch._watch = watch.Watch(rank, world_size, TIMEOUT_S, world.device)
    watch.meet()
    counts: dict[str, int] = {}
    if rank == 0:
        _slow_down(RandomSource, "read", "fill", counts)
        _slow_down(checkpoint_writer._SummedStream, "write", "save", counts)
        _slow_down(FileSystemReader, "_slice_file", "load", counts)
    trainer = open_trainer(resolved(config, world.size), world)
    dist.barrier()  # as what follows may be in any job: it is not patient
    path = save_checkpoint(folder, 1, {}, trainer.models)
    load_checkpoint(open_checkpoint(path), trainer.models)
    dist.barrier()
    watch.unwatch()
    return counts


def _slow_down(owner: Any, name: str, what: str, counts: dict[str, int]) -> None:
    """Let the first calls of a method take long; count those."""
    method: Callable[..., Any] = getattr(owner, name)

    def slow(*args: Any) -> Any:
        if counts.setdefault(what, 0) < NUM_SLOW:
            counts[what] += 1
            time.sleep(SLOW_S)
        return method(*args)

    setattr(owner, name, slow)
