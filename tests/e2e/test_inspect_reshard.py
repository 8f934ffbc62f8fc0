"""``puzzle-align inspect reshard``: what it says is what the routing table holds."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from matplotlib.image import imread

from tests.command import main

Inspect = Callable[..., tuple[int, list[str], list[str]]]


@pytest.fixture
def inspect(capsys: pytest.CaptureFixture[str]) -> Inspect:
    """``inspect(*arguments)``: exit code, and the lines of stdout and stderr."""

    def call(*arguments: str) -> tuple[int, list[str], list[str]]:
        code = main(["inspect", "reshard", "--config", *arguments])
        shown = capsys.readouterr()
        return code, shown.out.splitlines(), shown.err.splitlines()

    return call


def test_volumes_of_a_7b_model_beside_the_least_and_hybridflow_s(inspect: Inspect) -> None:
    code, shown, errors = inspect("ppo_7b", "--from", "1,1,8", "--to", "1,4,2")
    assert (code, errors) == (0, [])
    # Six sixteenths of 13.5 GiB; on eight ranks.
    for name in ("received", "sent", "lower bound"):
        assert f"{name}: 5.1 GiB a rank at most, 40.5 GiB in all" in shown
    assert "HybridFlow's 3D-HybridEngine would receive 5.1 GiB a rank" in shown
    assert "to   (P1, D4, T2), ranks 0, 4, 1, 5, 2, 6, 3, 7" in shown
    assert shown[-1].split() == ["from", "7", *"----", *["1.7", "GiB"] * 3, "-", "|", "@@@", "|"]
    code, shown, _ = inspect("ppo_7b", "--from", "1,1,8", "--to", "1,4,2", "--ranks-per-node", "4")
    assert code == 0 and "between nodes of 4: 0 B" in shown


def test_the_job_s_own_switch(inspect: Inspect) -> None:
    plan = "generation.parallel.tensor_model_parallel_size=2"
    code, shown, errors = inspect("ppo_tiny", plan, "--world-size", "2", "--routes")
    assert (code, errors) == (0, [])
    assert shown[1:3] == ["from (P1, D2, T1), ranks 0 to 1", "to   (P1, D1, T2), ranks 0 to 1"]
    assert "received: 0 B a rank at most, 0 B in all" in shown  # replicas have all of it
    code, shown, _ = inspect("ppo_tiny", "--from", "2,1,1", "--to", "1,1,2", "--routes")
    (counted,) = (re.match(r"table: (\d+) routes", line) for line in shown if "table" in line)
    routes = [line for line in shown if re.match(r"  [01] -> [01]: \S+\[", line)]
    assert counted is not None and len(routes) == int(counted[1]) > 0


def test_relays_are_marked(inspect: Inspect) -> None:
    code, shown, _ = inspect("ppo_tiny", "--from", "1,1,1", "--to", "1,4,1", "--routes")
    assert code == 0
    (counted,) = (
        re.match(r"table: \d+ routes, (\d+) of them relays", s) for s in shown if "table" in s
    )
    relays = [line for line in shown if line.endswith(", relayed")]
    assert counted is not None and len(relays) == int(counted[1]) > 0
    assert all(re.match(r"  [123] -> [123], [123]: ", line) for line in relays)


def test_many_ranks_show_their_busiest_links(inspect: Inspect) -> None:
    code, shown, _ = inspect("dpo_7b", "--from", "4,2,4", "--to", "1,16,2")
    assert code == 0 and sum(" -> " in line for line in shown) == 16
    assert re.fullmatch(r"  and \d+ links more, none of them busier", shown[-1])


def test_the_picture_is_drawn_where_it_can_be(tmp_path: Path, inspect: Inspect) -> None:
    plans = ("ppo_tiny", "--from", "2,1,1", "--to", "1,1,2")
    code, shown, errors = inspect(*plans, "--png", f"{tmp_path}/new/a.png")
    assert (code, errors) == (0, [])
    assert shown == inspect(*plans)[1]
    assert imread(tmp_path / "new" / "a.png").ndim == 3
    (tmp_path / "file").touch()
    code, _, errors = inspect(*plans, "--png", f"{tmp_path}/file/a.png")
    assert code == 2 and len(errors) == 1
    assert errors[0].startswith(f"error: --png {tmp_path}/file/a.png: cannot be written (")


def test_hybridflow_is_named_where_it_serves_alone(inspect: Inspect) -> None:
    for plan, serves in (("2,4,2", True), ("1,4,4", False)):  # its tensor size never grows
        _, shown, _ = inspect("ppo_7b", "--from", "8,1,2", "--to", plan)
        assert any("HybridFlow" in line for line in shown) == serves


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["ppo_tiny"], "error: nothing moves in this job: set generation.parallel .*"),
        (["dpo_tiny"], "error: nothing moves in this job: give --from and --to"),
        (["ppo_tiny", "--from", "1,1,2"], "error: --from and --to: give both, or neither"),
        (
            ["ppo_7b", "--from", "1,1,1", "--to", "1,1,16"],
            r"error: \(P1, D1, T16\): tensor size 16 does not divide num_key_value_heads=8 .*",
        ),
    ],
)
def test_what_cannot_be_shown_is_one_line(
    inspect: Inspect, arguments: list[str], line: str
) -> None:
    code, shown, errors = inspect(*arguments)
    assert code == 2 and not shown
    assert len(errors) == 1 and re.fullmatch(line, errors[0])
