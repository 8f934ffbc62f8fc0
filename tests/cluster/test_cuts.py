"""Links that are cut, hosts that die: every rank ends in time, and says whom it has lost."""

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cluster.hosts import Host, cluster
from tests.cluster.jobs import END_S, TIMEOUT_S, Part, start, wait_for
from tests.metrics import records


def _end_of_ranks(parts: list[Part]) -> None:
    """Wait until no rank is left on any host; fails after the time-out and 15 s."""
    end = time.monotonic() + TIMEOUT_S + END_S
    while left := [part.host.name for part in parts if part.ranks()]:
        assert time.monotonic() < end, f"ranks are left on {left}"
        time.sleep(0.2)


def _cut(host: Host) -> None:
    host.cut()


WHERE = {"step": "step 10/", "start": "data:"}


@pytest.mark.parametrize(
    ("side", "where"),
    [
        (1, "step"),
        pytest.param(0, "step", marks=pytest.mark.slow),
        pytest.param(1, "start", marks=pytest.mark.slow),
        pytest.param(0, "start", marks=pytest.mark.slow),
    ],
)
def test_a_cut_link_ends_all_ranks_in_time(side: int, where: str, tmp_path: Path) -> None:
    """Of the host without the launcher's store, or of the one that holds it."""
    with cluster(2) as hosts:
        parts = start(hosts, tmp_path, "max_steps=5000", "checkpoint.save_every=5")
        wait_for(parts[0], WHERE[where])
        hosts[side].cut()
        _end_of_ranks(parts)
        assert parts[0].ended(30) != 0
    first, second = (part.text for part in parts)
    named = [line for line in first.splitlines() if line.startswith("rank 1 ")]
    assert len(named) == 1 and f"has not answered for {TIMEOUT_S} s" in named[0]
    lost = [line for line in second.splitlines() if line.startswith("rank 1 stopped")]
    assert len(lost) == 1 and "the launcher's store on 10.77.0.1 has not answered" in lost[0]
    assert "Traceback" not in second


@pytest.mark.slow
def test_a_short_cut_is_survived(tmp_path: Path) -> None:
    with cluster(2) as hosts:
        parts = start(hosts, tmp_path, "max_steps=40", "engine.distributed_timeout=30")
        wait_for(parts[0], "step 10/")
        hosts[1].cut()
        time.sleep(5)
        hosts[1].heal()
        assert [part.ended(100) for part in parts] == [0, 0]
    assert records(tmp_path / "out")[-1]["step"] == 40


@pytest.mark.slow
@pytest.mark.parametrize("side", [0, 1])
@pytest.mark.parametrize("do", [Host.die, _cut])
def test_what_was_saved_is_whole_after_a_host_is_lost(
    do: Callable[[Host], None], side: int, tmp_path: Path
) -> None:
    """The job goes on from it, as if it had never ended."""
    steps = ("max_steps=100", "checkpoint.save_every=5")
    with cluster(2) as hosts:
        whole = start(hosts, tmp_path / "whole", *steps)
        assert [part.ended(100) for part in whole] == [0, 0]
        lost = start(hosts, tmp_path / "lost", *steps)
        wait_for(lost[0], "step 10/")
        do(hosts[side])
        _end_of_ranks([part for part in lost if part.host.number != side or do is _cut])
    with cluster(2) as hosts:
        again = start(hosts, tmp_path / "lost", *steps)
        assert [part.ended(100) for part in again] == [0, 0]
    assert "resumed from step" in again[0].text
    first, second = (
        {r["step"]: r["loss"] for r in records(tmp_path / name / "out") if "loss" in r}
        for name in ("whole", "lost")
    )
    assert first == second
