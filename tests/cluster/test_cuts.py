"""Links that are cut, hosts that die: every rank ends in time, and says whom it has lost."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.cluster.hosts import Host, cluster
from tests.cluster.jobs import END_S, TIMEOUT_S, Part, import_seconds, start, until, wait_for
from tests.metrics import records

RANK = "puzzle_align.stages.run"  # imported before a rank joins


def _end_of_ranks(parts: list[Part], imports_s: float = 0.0) -> None:
    """Wait until no rank is left on any host; fails after the time-out and 15 s.

    Args:
        imports_s: of the ranks, if they have just begun: they watch one another from then on.
    """
    end = time.monotonic() + imports_s + TIMEOUT_S + END_S
    while left := [part.host.name for part in parts if part.ranks()]:
        assert time.monotonic() < end, f"ranks are left on {left}"
        time.sleep(0.2)


def _cut(host: Host) -> None:
    host.cut()


def _is_saving(parts: list[Part]) -> bool:
    return any((parts[0].log.parent / "out" / "checkpoints").glob(".saving_*"))


def _is_switching(parts: list[Part]) -> bool:
    """Weights are on their way: the models are built, and some of their bytes have come."""
    return "predicted" in parts[0].text and parts[1].host.counters()["received"] > 600_000


@dataclass(frozen=True)
class Moment:
    """When links are cut: whether it is time, overrides, the links' rate, the head's address."""

    is_there: Callable[[list[Part]], bool]
    overrides: tuple[str, ...] = ("max_steps=5000", "checkpoint.save_every=5")
    rate: str = ""
    head: str = "10.77.0.1"


SWITCH = (
    "--config=ppo_tiny",
    "generation.parallel.data_parallel_size=2",
    "generation.parallel.pipeline_model_parallel_size=1",
)
MOMENTS = {
    # On the second network, which is not that of the head's name.
    "step": Moment(lambda parts: "step 10/" in parts[0].text, head="10.78.0.1"),
    "import": Moment(lambda parts: all(part.ranks() for part in parts)),
    "data": Moment(
        lambda parts: "output:" in parts[0].text,
        ("data.num_synthetic=200000",),
    ),
    "saving": Moment(_is_saving, ("max_steps=5000", "checkpoint.save_every=1")),
    "generate": Moment(_is_switching, SWITCH, "1mbit"),
}


@pytest.mark.parametrize(
    ("side", "moment"),
    [
        (1, "step"),
        *(
            pytest.param(side, moment, marks=pytest.mark.slow)
            for moment in MOMENTS
            for side in (0, 1)
            if (side, moment) != (1, "step")
        ),
    ],
)
def test_a_cut_link_ends_all_ranks_in_time(side: int, moment: str, tmp_path: Path) -> None:
    """Of the host without the launcher's store, or of the one that holds it."""
    when = MOMENTS[moment]
    with cluster(2, when.rate) as hosts:
        imports_s = import_seconds(hosts, RANK) if moment == "import" else 0.0
        parts = start(hosts, tmp_path, *when.overrides, head=f"{when.head}:29500")
        until(lambda: when.is_there(parts), parts)
        if moment == "step":  # megabytes of weights and activations went by the head's network
            assert sum(hosts[0].counters().values()) < 2**20
        hosts[side].cut()
        _end_of_ranks(parts, imports_s)
        assert parts[0].ended(30) != 0
    first, second = (part.text for part in parts)
    named = [line for line in first.splitlines() if line.startswith("rank 1 ")]
    assert len(named) == 1
    assert (f"for {TIMEOUT_S} s" in named[0] and "node1" in named[0]) or moment == "import"
    lost = [line for line in second.splitlines() if line.startswith("rank 1 stopped")]
    assert len(lost) == 1 and f"the launcher's store on {when.head} has not answered" in lost[0]
    if moment in ("saving", "generate"):
        assert moment in lost[0]
    assert "Traceback" not in first + second


def _assert_same(one: Path, other: Path) -> None:
    """Both runs have the same losses, and the same weights and optimizer states at their end."""
    folders = (one / "out", other / "out")
    losses = [{r["step"]: r["loss"] for r in records(f) if "loss" in r} for f in folders]
    states = [
        {path.name: path.read_bytes() for path in f.glob("checkpoints/*100/*.distcp")}
        for f in folders
    ]
    assert losses[0] == losses[1] and max(losses[0]) == 100
    assert states[0] == states[1] and len(states[0]) > 1


@pytest.mark.slow
@pytest.mark.parametrize("side", [0, 1])
def test_a_short_cut_is_survived(side: int, tmp_path: Path) -> None:
    steps = ("max_steps=100", "checkpoint.save_every=5", "engine.distributed_timeout=30")
    with cluster(2) as hosts:
        whole = start(hosts, tmp_path / "whole", *steps)
        assert [part.ended(200) for part in whole] == [0, 0]
        parts = start(hosts, tmp_path / "cut", *steps)
        wait_for(parts[0], "step 10/")
        hosts[side].cut()
        time.sleep(5)
        hosts[side].heal()
        assert [part.ended(200) for part in parts] == [0, 0]
    assert "resumed" not in parts[0].text
    _assert_same(tmp_path / "cut", tmp_path / "whole")


@pytest.mark.slow
@pytest.mark.parametrize("side", [0, 1])
@pytest.mark.parametrize("lost", ["link", "host"])
def test_a_job_comes_back_by_itself(lost: str, side: int, tmp_path: Path) -> None:
    """Once the link is there again, or the host with the same line; as if it had never gone."""
    steps = ("max_steps=100", "checkpoint.save_every=5")
    with cluster(2) as hosts:
        whole = start(hosts, tmp_path / "whole", *steps)
        assert [part.ended(200) for part in whole] == [0, 0]
        parts = start(hosts, tmp_path / "lost", *steps, MAX_RESTARTS="1")
        wait_for(parts[0], "step 10/")
        if lost == "link":
            hosts[side].cut()
            _end_of_ranks(parts)
            time.sleep(3)  # both wait
            hosts[side].heal()
        else:
            hosts[side].die()
            time.sleep(3)
            hosts[side].revive()
            (parts[side],) = start([hosts[side]], tmp_path / "lost", *steps, MAX_RESTARTS="1")
        assert [part.ended(200) for part in parts] == [0, 0]
    logs = "".join(path.read_text() for path in (tmp_path / "lost").glob("*.log"))
    assert "resumed from step" in logs
    _assert_same(tmp_path / "lost", tmp_path / "whole")


@pytest.mark.slow
@pytest.mark.parametrize("side", [0, 1])
@pytest.mark.parametrize("do", [Host.die, _cut])
@pytest.mark.parametrize("moment", ["step", "saving"])
def test_what_was_saved_is_whole_after_a_host_is_lost(
    moment: str, do: Callable[[Host], None], side: int, tmp_path: Path
) -> None:
    """The job goes on from it, as if it had never ended."""
    steps = ("max_steps=100", "checkpoint.save_every=5")
    with cluster(2) as hosts:
        whole = start(hosts, tmp_path / "whole", *steps)
        assert [part.ended(200) for part in whole] == [0, 0]
        lost = start(hosts, tmp_path / "lost", *steps)
        wait_for(lost[0], "step 10/")
        until(lambda: moment == "step" or _is_saving(lost), lost)
        do(hosts[side])
        _end_of_ranks([part for part in lost if part.host.number != side or do is _cut])
    with cluster(2) as hosts:
        again = start(hosts, tmp_path / "lost", *steps)
        assert [part.ended(200) for part in again] == [0, 0]
    assert "resumed from step" in again[0].text
    _assert_same(tmp_path / "lost", tmp_path / "whole")
