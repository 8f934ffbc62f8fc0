"""Who is watched and lets others wait in good faith is not taken for one that hangs."""

import datetime
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint import FileSystemReader

from puzzle_align.config.load import find_config, load_file
from puzzle_align.config.saved import open_checkpoint
from puzzle_align.models.hf.sources import RandomSource
from puzzle_align.runtime.checkpoint import writer as checkpoint_writer
from puzzle_align.runtime.checkpoint.models import load_checkpoint, save_checkpoint
from puzzle_align.runtime.groups.collectives import sum_on_host, wait_for_all
from puzzle_align.runtime.groups.world import World
from puzzle_align.runtime.liveness import watch
from puzzle_align.runtime.liveness.activity import activity, unhurried
from puzzle_align.stages.ppo import open_trainer
from puzzle_align.stages.rewards.worker import RewardWorker
from tests.dist.spawn import run_ranks
from tests.jobs import resolved
from tests.unit.test_reward_worker import GIVEN, MODULE, STATE

TIMEOUT_S = 4.0


def test_ranks_that_go_on_slowly_or_need_no_hurry_are_not_blamed() -> None:
    assert run_ranks(_meet_late, 4, timeout=100.0) == [10.0] * 4


def _meet_late(rank: int, world_size: int) -> float:
    """Rank 0 goes on slowly, 1 is told not to hurry, 2 has a reward function; 3 waits for all."""
    watch._watch = watch.Watch(rank, world_size)
    watch._watch.join(TIMEOUT_S, torch.device("cpu"))
    watch.meet()
    end = time.monotonic() + TIMEOUT_S + 3.0
    if rank == 0:
        while time.monotonic() < end:
            with activity("a step"):
                time.sleep(0.5)
    if rank == 1:
        with unhurried():
            time.sleep(end - time.monotonic())
    if rank == 2:  # which has a time-out of its own
        os.environ["SLOW"] = str(TIMEOUT_S + 3.0)
        worker = RewardWorker([f"{MODULE}:slow"], 60.0)
        assert worker(GIVEN, STATE)[0].rewards.tolist() == [1.0] * 3
        worker.close()
    total = sum_on_host(torch.tensor(rank + 1.0)).item()
    watch.unwatch()
    return total


def test_a_watch_that_fails_ends_its_rank_with_a_word(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(RuntimeError):
        run_ranks(_lose_a_descriptor, 2, timeout=60.0)
    log = capfd.readouterr().err
    assert "rank 1 failed in a step: its watch over the others ended: OSError: " in log, log
    assert "rank 0 stopped, because rank 1 failed" in log


def _lose_a_descriptor(rank: int, world_size: int) -> None:
    """Code of the user's closes what is not its own, under rank 1's watch."""
    watch._watch = watch.Watch(rank, world_size)
    watch._watch.join(TIMEOUT_S, torch.device("cpu"))
    watch.meet()
    if rank == 1:
        with activity("a step"):
            os.close(watch._watch._wake)
            time.sleep(60.0)
    sum_on_host(torch.ones(1))


SLOW_TIMEOUT_S = 3.0
LIMIT = datetime.timedelta(seconds=4.5)  # of the groups
NUM_SLOW, SLOW_S = 9, 0.8  # longer than both time-outs, and than the watch takes to be sure
APART = ['actor.ranks="0"', 'critic.ranks="1"', "data.cache_dir=null"]


@pytest.mark.slow  # it waits, for longer than all time-outs
def test_others_wait_for_a_rank_that_loads_or_saves_slowly(tmp_path: Path) -> None:
    """For longer than any time-out: of two ranks the actor's has a slow disk."""
    slow = run_ranks(_load_and_save, 2, tmp_path, timeout=100.0)[0]
    assert slow == {"fill": NUM_SLOW, "save": NUM_SLOW, "load": NUM_SLOW}


def _load_and_save(rank: int, world_size: int, folder: Path) -> dict[str, int]:
    """How much of each the actor's rank did slowly."""
    world = World(rank, world_size, torch.device("cpu"), LIMIT)
    config = load_file(find_config("ppo_tiny"), [*APART, f"output_dir={folder}"])
    wait_for_all(world.device)
    dist.distributed_c10d._set_pg_timeout(LIMIT, dist.group.WORLD)
    watch._watch = watch.Watch(rank, world_size)
    watch._watch.join(SLOW_TIMEOUT_S, world.device)
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
