"""Who is watched and lets others wait in good faith is not taken for one that hangs."""

import time

import torch

from puzzle_align.runtime import watch
from puzzle_align.runtime.progress import phase, unhurried
from puzzle_align.runtime.reduce import sum_on_host
from tests.dist.spawn import run_ranks

TIMEOUT_S = 4.0


def test_ranks_that_go_on_slowly_or_need_no_hurry_are_not_blamed() -> None:
    assert run_ranks(_meet_late, 3, timeout=100.0) == [6.0] * 3


def _meet_late(rank: int, world_size: int) -> float:
    """Rank 0 goes on slowly, rank 1 is told not to hurry, rank 2 waits for both."""
    watch._watch = watch.Watch(rank, world_size, TIMEOUT_S, torch.device("cpu"))
    watch.meet()
    end = time.monotonic() + TIMEOUT_S + 3.0
    if rank == 0:
        while time.monotonic() < end:
            with phase("a step"):
                time.sleep(0.5)
    if rank == 1:
        with unhurried():
            time.sleep(end - time.monotonic())
    total = sum_on_host(torch.tensor(rank + 1.0)).item()
    watch.unwatch()
    return total
