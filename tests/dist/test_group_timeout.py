"""A model's groups fail when a rank does not come, as soon as the job's timeout says."""

import datetime
import time

import pytest
import torch
import torch.distributed as dist

from puzzle_align.layout.plan import ParallelPlan
from puzzle_align.runtime.groups import build_groups, build_links
from tests.dist.spawn import run_ranks

PLAN = ParallelPlan(pipeline=2)
TIMEOUT_S = 3.0


def test_a_rank_that_stays_away_is_noticed() -> None:
    for seconds in run_ranks(_wait_alone, 2, timeout=100.0)[0]:
        assert TIMEOUT_S - 1 < seconds < TIMEOUT_S + 10


def _wait_alone(rank: int, _world_size: int) -> list[float]:
    """Seconds until rank 0 gave up a collective and a receive, which rank 1 never joins."""
    timeout = datetime.timedelta(seconds=TIMEOUT_S)
    groups = build_groups(PLAN, timeout=timeout)
    links = build_links(PLAN, torch.device("cpu"), timeout=timeout)
    if rank == 1:
        return []
    waited = []
    for join in (
        lambda: dist.all_reduce(torch.zeros(1), group=groups.pp),
        lambda: dist.recv(torch.zeros(1), 1, group=links.backward),
    ):
        started = time.monotonic()
        with pytest.raises(RuntimeError, match="(?i)timed out"):
            join()
        waited.append(time.monotonic() - started)
    return waited
