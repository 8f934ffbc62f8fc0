"""Collectives on real ranks: exchanged items, what rank 0 makes for all, waiting and time-outs."""

import datetime
import time
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from puzzle_align.layout.plan import ParallelPlan
from puzzle_align.runtime.columns import Responses, Table, exchange
from puzzle_align.runtime.groups.collectives import from_rank_zero, wait_for_all
from puzzle_align.runtime.groups.world import World, build_communicators
from tests.dist.spawn import run_ranks

NUM_RANKS, NUM_ITEMS = 3, 11
TOKEN = 2**53 + 1


def _item(number: int, length: int) -> np.ndarray:
    return np.random.default_rng(number).standard_normal((length, 2))


def _exchanged(rank: int, world_size: int) -> None:
    generator = np.random.default_rng(7)
    sources = generator.integers(0, world_size, NUM_ITEMS)
    lengths = generator.integers(0, 5, NUM_ITEMS)
    held = {n: _item(n, int(lengths[n])) for n in np.flatnonzero(sources == rank).tolist()}
    wishes = [list(range(NUM_ITEMS)), [], [10, 3, 4]]
    for turn in range(world_size):  # every rank has each kind of wish once
        wanted = wishes[(rank + turn) % world_size]
        found = exchange(held, wanted, sources=sources, lengths=lengths, num_columns=2)
        assert set(found) == set(wanted)
        for number, values in found.items():
            np.testing.assert_array_equal(values, _item(number, int(lengths[number])))
        tokens = {n: np.full((int(lengths[n]), 1), TOKEN + n) for n in held}
        sent = exchange(
            tokens, wanted, sources=sources, lengths=lengths, num_columns=1, dtype=np.int64
        )
        for number, values in sent.items():  # whole numbers stay whole: float64 would lose the last
            assert values.dtype == np.int64
            assert values.tolist() == [[TOKEN + number]] * int(lengths[number])


def test_every_rank_gets_what_it_asks_for_and_nothing_else() -> None:
    run_ranks(_exchanged, NUM_RANKS, timeout=60)


def _given_and_fetched(rank: int, world_size: int) -> None:
    """Six responses; others own them than have computed their values, one more than tokens."""
    owners, sources = np.array([2, 0, 0, 1, 2, 1]), np.array([0, 1, 2, 0, 1, 2])
    lengths = np.array([2, 0, 3, 1, 2, 4])
    owned = np.flatnonzero(owners == rank).tolist()
    table = Table(Responses(lengths, owners))
    computed = {r: 10.0 * r + np.arange(lengths[r] + 1) for r in range(6) if sources[r] == rank}
    table.give("states", computed, sources, lengths + 1)
    assert {r: values.tolist() for r, values in table.by_token["states"].items()} == {
        r: [10.0 * r + place for place in range(lengths[r] + 1)] for r in owned
    }
    for name, first in (("one", 0), ("two", TOKEN)):
        table.by_token[name] = {r: first + 10 * r + np.arange(lengths[r]) for r in owned}
    wanted = [[4, 0, 1], [], [2]][rank]
    fetched = table.fetch(["two", "one"], wanted, np.int64)
    assert [*fetched.by_token] == ["two", "one"]
    for name, first in (("one", 0), ("two", TOKEN)):
        assert {r: values.tolist() for r, values in fetched.by_token[name].items()} == {
            r: [first + 10 * r + place for place in range(lengths[r])] for r in wanted
        }
    states = table.by_token["states"].items()
    table.by_token["logps"] = {response: values[:-1] for response, values in states}
    logps = table.fetch(["logps"], wanted).by_token["logps"]
    assert {r: values.tolist() for r, values in logps.items()} == {
        r: [10.0 * r + place for place in range(lengths[r])] for r in wanted
    }


def test_columns_go_to_owners_and_from_there_to_who_wants_them() -> None:
    run_ranks(_given_and_fetched, 3, timeout=60)


GROUP_TIMEOUT_S = 4.0
MAKE_S = 6.5


def test_from_rank_zero_outlasts_the_time_out(tmp_path: Path) -> None:
    assert run_ranks(_long_work, 2, str(tmp_path / "store")) == [("made", "bad row")] * 2


def _long_work(rank: int, world_size: int, store: str) -> tuple[str, str]:
    dist.barrier()  # the other rank has connected
    dist.destroy_process_group()
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=world_size,
        timeout=datetime.timedelta(seconds=GROUP_TIMEOUT_S),
    )
    value = from_rank_zero(lambda: _slowly(rank))
    with pytest.raises(ValueError) as raised:
        from_rank_zero(_fail_on_rank_zero)
    return value, str(raised.value)


def _slowly(rank: int) -> str:
    assert rank == 0
    time.sleep(MAKE_S)
    return "made"


def _fail_on_rank_zero() -> str:
    raise ValueError("bad row")


def test_all_wait_for_the_slowest() -> None:
    ends = run_ranks(_come_late, 3)
    assert max(late for late, _ in ends) <= min(done for _, done in ends)


def _come_late(rank: int, _world_size: int) -> tuple[float, float]:
    """When this rank came, one after the other, and when it went on; one machine has one clock."""
    time.sleep(0.2 * rank)
    came = time.monotonic()
    wait_for_all(torch.device("cpu"))
    return came, time.monotonic()


PLAN = ParallelPlan(pipeline=2)
STAY_AWAY_S = 2.0


def test_a_rank_that_stays_away_is_noticed() -> None:
    for seconds in run_ranks(_wait_alone, 3, timeout=100.0)[0]:
        assert STAY_AWAY_S - 1 < seconds < STAY_AWAY_S + 10


def _wait_alone(rank: int, world_size: int) -> list[float]:
    """Seconds until rank 0 gave up a collective and a receive, which rank 1 never joins, and
    making groups with rank 2, which makes none.
    """
    timeout = datetime.timedelta(seconds=STAY_AWAY_S)
    world = World(rank, world_size, torch.device("cpu"), timeout)
    found = build_communicators(PLAN, world, [0, 1], trained=True)
    if rank > 0:
        return []
    assert found is not None
    waited = []
    for join in (
        lambda: dist.all_reduce(torch.zeros(1), group=found.groups.pp),
        lambda: dist.recv(torch.zeros(1), 1, group=found.links.groups["backward"]),
        lambda: build_communicators(PLAN, world, [0, 2], trained=True),
    ):
        started = time.monotonic()
        with pytest.raises(RuntimeError, match="(?i)timed out|timeout"):
            join()
        waited.append(time.monotonic() - started)
    return waited
