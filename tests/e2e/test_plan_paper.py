"""PUZZLE's configurations planned on paper, the smallest of them: that the figures agree."""

import json
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.launch import ROOT, run_tool

TOOL = ROOT / "tools" / "plan_paper.py"
SMALL = ("--case", "7B/350M", "--cluster", "phoenix", "--rows", "4096")


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    done = run_tool(TOOL, *SMALL)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def _plans(family: dict[str, Any]) -> list[dict[str, Any]]:
    return [family["best"], *(family[name] for name in family["speedup"])]


def test_phases_sum_to_the_iteration_and_every_plan_fits(found: dict[str, Any]) -> None:
    (case,) = found["cases"]
    families = case["switch"].values()
    plans = [case["chosen"], *chain.from_iterable(_plans(family) for family in families)]
    assert len(plans) == 1 + 4 + 4 + 3
    for plan in plans:
        assert plan["seconds"] == pytest.approx(sum(plan["phases"].values()))
        assert plan["peak_gb"] <= 72
        switched = plan["trains"] != plan["samples"]
        assert ("switch" in plan["phases"]) == switched


def test_a_switch_is_no_slower_than_single_plans(found: dict[str, Any]) -> None:
    (case,) = found["cases"]
    assert case["switch"]["all"]["best"] == case["chosen"]
    for family in case["switch"].values():
        best = family["best"]
        for name, speedup in family["speedup"].items():
            single = family[name]
            assert single["trains"] == single["samples"]
            assert speedup == pytest.approx(single["seconds"] / best["seconds"])
    for name in ("all", "no_replicas"):
        family = case["switch"][name]
        assert min(family["speedup"].values()) == family["speedup"]["fastest_single"] >= 1
        optimal = family["generation_optimal"], family["training_optimal"]
        generate = [plan["phases"]["generate"] for plan in optimal]
        train = [plan["phases"]["score"] + plan["phases"]["learn"] for plan in optimal]
        assert generate[0] <= generate[1] and train[0] >= train[1]
    assert found["mean"]["all"] == pytest.approx(case["switch"]["all"]["speedup"])


def test_time_sharing_is_no_slower_and_near_equation_1(found: dict[str, Any]) -> None:
    (case,) = found["cases"]
    sharing = case["time_sharing"]
    assert {tuple(one["plan"]) for one in sharing["plans"]} >= {(8, 1, 1), (4, 1, 2), (4, 2, 1)}
    assert {one["batch"] for one in sharing["plans"]} == {128, 64, 32}
    for one in sharing["plans"]:
        assert one["of_passes"] >= one["speedup"] >= 1
        assert one["of_passes"] == pytest.approx(one["equation_1"], abs=0.1)
    assert sharing["most"]["speedup"] == max(one["speedup"] for one in sharing["plans"])


def test_the_switch_of_table_3_is_told_beside_the_paper_s_seconds(found: dict[str, Any]) -> None:
    paper = found["cases"][0]["switch"]["as_the_paper"]
    assert (paper["best"]["trains"], paper["best"]["samples"]) == ([8, 1, 1], [4, 1, 2])
    assert paper["table_3_seconds"] == 0.02 and not paper["plans_stated"]
    assert 0 < paper["switch_seconds"] == paper["best"]["phases"]["switch"] < 0.1


def test_the_table_has_them_all(found: dict[str, Any], tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    file.write_text(json.dumps(found))
    done = run_tool(TOOL, "--figures", str(file), "--table")
    assert done.returncode == 0, done.stderr
    for words in ("7B/350M on phoenix", "chosen:", "Equation (1)", "Table 3 0.02 s", "1.22"):
        assert words in done.stdout
