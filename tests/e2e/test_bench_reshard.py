"""The benchmark of switches at its smallest: that it runs, and counts right."""

import json

import pytest

from tests.e2e.launch import ROOT, run_tool

TOOL = ROOT / "tools" / "bench_reshard.py"


def test_three_ways_are_measured() -> None:
    small = ("--ranks", "2", "--hidden", "64", "--layers", "2", "--repeats", "1")
    done = run_tool(TOOL, "measured", *small)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert [(each["from"], each["to"]) for each in found] == [
        ([2, 1, 1], [1, 1, 2]),
        ([1, 1, 2], [1, 2, 1]),
    ]
    for each in found:
        assert each["received_over_bound"] == 1.0
        assert each["seconds"].keys() == {"table", "rank 0", "all-gather"}
        assert all(ratio > 0 for ratio in each["ratios"].values())


def test_paper_is_hybridflow_s_figure_where_that_applies() -> None:
    done = run_tool(TOOL, "paper")
    assert done.returncode == 0, done.stderr
    first, *others = json.loads(done.stdout)
    assert (first["from"], first["to"]) == ([1, 1, 8], [1, 4, 2])
    assert first["received_gb"] == pytest.approx(6 / 16 * first["model_gb"], rel=1e-3)  # but norms
    assert first["declared_seconds"] == pytest.approx(first["received_gb"] / 200)
    for each in (first, *others):
        assert each["received_gb"] == each["lower_bound_gb"]
