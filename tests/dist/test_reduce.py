"""What rank 0 makes reaches every rank, however long it takes, and so do its errors; ranks wait."""

import datetime
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from puzzle_align.runtime.groups.collectives import from_rank_zero, wait_for_all
from tests.dist.spawn import run_ranks

GROUP_TIMEOUT_S = 3.0
MAKE_S = 7.0


def test_from_rank_zero_outlasts_the_time_out(tmp_path: Path) -> None:
    assert run_ranks(_long_work, 2, str(tmp_path / "store")) == [("made", "bad row")] * 2


def _long_work(rank: int, world_size: int, store: str) -> tuple[str, str]:
    dist.destroy_process_group()
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=world_size,
        timeout=datetime.timedelta(seconds=GROUP_TIMEOUT_S),
    )
    value = from_rank_zero(lambda: _slowly(rank))
    with pytest.raises(ValueError) as error:
        from_rank_zero(_fail)
    return value, str(error.value)


def _slowly(rank: int) -> str:
    assert rank == 0
    time.sleep(MAKE_S)
    return "made"


def _fail() -> str:
    raise ValueError("bad row")


def test_all_wait_for_the_slowest() -> None:
    ends = run_ranks(_wait, 3)
    assert max(late for late, _ in ends) <= min(done for _, done in ends)


def _wait(rank: int, _world_size: int) -> tuple[float, float]:
    """When this rank came, one after the other, and when it went on; one machine has one clock."""
    time.sleep(0.2 * rank)
    came = time.monotonic()
    wait_for_all(torch.device("cpu"))
    return came, time.monotonic()
