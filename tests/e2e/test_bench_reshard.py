"""The benchmark of switches at its smallest: that it runs, checks and counts right."""

import json

import pytest

from tests.e2e.launch import ROOT, run_tool

TOOL = ROOT / "tools" / "bench_reshard.py"


WAYS = {"table", "rank 0", "all-gather"}
SMALL = ("--ranks", "2", "--hidden", "64", "--layers", "2", "--repeats", "1")


def test_three_ways_are_measured() -> None:
    done = run_tool(TOOL, "measured", *SMALL)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    pairs = [(each["from"], each["to"]) for each in found]
    assert pairs[:2] == [([2, 1, 1], [1, 1, 2]), ([1, 1, 2], [1, 2, 1])]
    for each in found:
        assert each["seconds"].keys() == WAYS
        assert each["ratios"].keys() == WAYS - {"table"}
        assert all(ratio > 0 for ratio in each["ratios"].values())
        over = each["received_over_bound"]
        assert over["table"] == 1.0 <= over["all-gather"]
        assert over["rank 0"] > 1.0


def test_paper_is_at_the_bound_and_no_more_than_hybridflow_s() -> None:
    done = run_tool(TOOL, "paper", "--case", "7B")
    assert done.returncode == 0, done.stderr
    found = {each["case"]: each for each in json.loads(done.stdout)}
    assert {each["ranks"] for each in found.values()} == {8, 16, 32}
    for each in found.values():
        assert each["received_gb"] == each["lower_bound_gb"]
        assert each["all_received_gb"] == each["all_lower_bound_gb"]
        assert each["hybridflow_gb"] is None or each["received_gb"] <= each["hybridflow_gb"]
    eighths = found["7B (1, 1, 8) to (1, 4, 2)"]
    assert (eighths["from"], eighths["to"]) == ("(P1, D1, T8)", "(P1, D4, T2)")
    assert eighths["hybridflow_formula_gb"] == pytest.approx(6 / 16 * eighths["model_gb"])
    assert eighths["received_gb"] == pytest.approx(eighths["hybridflow_formula_gb"], rel=1e-3)
    assert eighths["received_gb"] < eighths["hybridflow_formula_gb"]  # all ranks have the norms
    full = eighths["received_gb"] * 1e9 / 2**26  # rounds of 64 MiB, were each full
    assert full <= eighths["rounds"] < 1.2 * full
    assert eighths["declared_seconds"] == pytest.approx(eighths["received_gb"] / 200)
    table_3 = [each for each in found.values() if each["paper_seconds"] is not None]
    assert len(table_3) == 4
    assert all(each["declared_seconds"] < each["paper_seconds"] for each in table_3)


def test_ranks_share_their_node_s_adapters() -> None:
    seconds = []
    for shared in ("1", "8"):
        name = "7B (1, 1, 8) to (1, 4, 8)"  # each new rank's part is sent from another node
        done = run_tool(TOOL, "paper", "--ranks-per-adapter", shared, "--case", name)
        (case,) = json.loads(done.stdout)
        assert case["inside_nodes_gb"] < 1e-3  # norms, which are too small to be cut
        seconds.append(case["declared_seconds"])
    assert 4 < seconds[1] / seconds[0] <= 8


def test_a_switch_beside_a_step_is_measured() -> None:
    small = ("--hidden", "64", "--layers", "2", "--repeats", "1", "--bucket", "4096")
    done = run_tool(ROOT / "tools" / "bench_reshard_beside.py", *small)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert [(each["switch"], each["sharded"], each["dtype"]) for each in found] == [
        (switch, sharded, dtype)
        for switch, sharded in (
            ("P2 to T2", False),
            ("T2 to D2", False),
            ("rank 0 to rank 1", False),
            ("D2 sharded to T2", True),
        )
        for dtype in ("fp32", "bf16")
    ]
    for each in found:
        seconds = each["seconds"]
        assert each["step_over_switch"] == pytest.approx(seconds["step"] / seconds["switch"])
        added = (seconds["both"] - seconds["step"]) / seconds["switch"]
        assert each["rounds"] > 2 and each["added_over_switch"] == pytest.approx(added)
