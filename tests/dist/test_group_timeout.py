"""A model's groups fail when a rank does not come, as soon as the job's timeout says."""

import datetime
import time

import pytest
import torch
import torch.distributed as dist

from puzzle_align.layout.plan import ParallelPlan
from puzzle_align.runtime.groups.world import World, build_communicators
from tests.dist.spawn import run_ranks

PLAN = ParallelPlan(pipeline=2)
TIMEOUT_S = 3.0


def test_a_rank_that_stays_away_is_noticed() -> None:
    for seconds in run_ranks(_wait_alone, 3, timeout=100.0)[0]:
        assert TIMEOUT_S - 1 < seconds < TIMEOUT_S + 10


def _wait_alone(rank: int, world_size: int) -> list[float]:
    """Seconds until rank 0 gave up a collective and a receive, which rank 1 never joins, and
    making groups with rank 2, which makes none.
    """
    timeout = datetime.timedelta(seconds=TIMEOUT_S)
    world = World(rank, world_size, torch.device("cpu"), timeout)
    found = build_communicators(PLAN, world, [0, 1], trained=True)
    if rank > 0:
        return []
    assert found is not None
    waited = []
    for join in (
        lambda: dist.all_reduce(torch.zeros(1), group=found.groups.pp),
        lambda: dist.recv(torch.zeros(1), 1, group=found.links.backward),
        lambda: build_communicators(PLAN, world, [0, 2], trained=True),
    ):
        started = time.monotonic()
        with pytest.raises(RuntimeError, match="(?i)timed out|timeout"):
            join()
        waited.append(time.monotonic() - started)
    return waited
