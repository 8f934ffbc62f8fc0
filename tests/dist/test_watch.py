"""Who is watched and lets others wait in good faith is not taken for one that hangs."""

import os
import time

import pytest
import torch

from puzzle_align.runtime.groups.collectives import sum_on_host
from puzzle_align.runtime.liveness import watch
from puzzle_align.runtime.liveness.activity import activity, unhurried
from puzzle_align.stages.rewards.worker import RewardWorker
from tests.dist.spawn import run_ranks
from tests.unit.test_reward_worker import GIVEN, MODULE, STATE

TIMEOUT_S = 4.0


def test_ranks_that_go_on_slowly_or_need_no_hurry_are_not_blamed() -> None:
    assert run_ranks(_meet_late, 4, timeout=100.0) == [10.0] * 4


def _meet_late(rank: int, world_size: int) -> float:
    """Rank 0 goes on slowly, 1 is told not to hurry, 2 has a reward function; 3 waits for all."""
    watch._watch = watch.Watch(rank, world_size, TIMEOUT_S, torch.device("cpu"))
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
    told = capfd.readouterr().err
    assert "rank 1 failed in a step: its watch over the others ended: OSError: " in told, told
    assert "rank 0 stopped, because rank 1 failed" in told


def _lose_a_descriptor(rank: int, world_size: int) -> None:
    """Code of the user's closes what is not its own, under rank 1's watch."""
    watch._watch = watch.Watch(rank, world_size, TIMEOUT_S, torch.device("cpu"))
    watch.meet()
    if rank == 1:
        with activity("a step"):
            os.close(watch._watch._wake)
            time.sleep(60.0)
    sum_on_host(torch.ones(1))
