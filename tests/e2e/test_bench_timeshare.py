"""tools/bench_timeshare.py at its smallest: its JSON is whole and its figures agree."""

import importlib
import json
from typing import Any

import pytest

from tests.e2e.launch import ROOT, run_tool


def _result(*arguments: str) -> dict[str, Any]:
    done = run_tool(ROOT / "tools" / "bench_timeshare.py", *arguments)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def _check_compared(found: dict[str, Any], num_steps: int) -> None:
    for figures in (found["measured"], found["simulated"]):
        if num_steps == 1:  # medians are the step itself
            ratio = figures["sequential_seconds"] / figures["time_shared_seconds"]
            assert figures["speedup"] == pytest.approx(ratio)
    ratio = found["measured"]["speedup"] / found["simulated"]["speedup"]
    assert found["measured_over_simulated"] == pytest.approx(ratio)
    for seconds in found["measured"]["all_seconds"].values():
        assert len(seconds) == num_steps


def test_simulated_figures_are_the_papers():
    sizes = ("--pipeline", "2", "4", "--multiples", "1")
    result = _result("simulated", *sizes, "--ratios", "1", "2", "--backwards", "2", "3")
    assert result["mode"] == "simulated"
    trainings, steps = result["two_trainings"], result["dpo_lookahead"]
    assert [(c["pipeline"], c["cost_ratio"]) for c in trainings] == [(2, 1), (2, 2), (4, 1), (4, 2)]
    equal = trainings[2]  # Figure 5: (M+P-1)(3+3) against M(3+3)+(P-1)3
    assert (equal["sequential"], equal["time_shared"]) == (42, 33)
    assert equal["bound"] == pytest.approx(42 / 33)
    unequal = trainings[3]  # Equation (1): 7*9 over 4*9+3*6
    assert unequal["bound"] == pytest.approx(63 / 54)
    assert unequal["speedup_over_bound"] > 1
    assert [c["bound"] for c in steps] == pytest.approx([4 / 3, 5 / 4] * 2)
    for case in trainings + steps:
        assert case["microbatches"] == case["pipeline"]
        assert case["speedup"] == pytest.approx(case["sequential"] / case["time_shared"])
        assert case["speedup_over_bound"] == pytest.approx(case["speedup"] / case["bound"])


def test_real_steps_give_costs_and_both_speedups():
    small = ("--layers", "2", "--prompt", "16", "--response", "8", "--microbatches", "3")
    result = _result("real", *small, "--steps", "2", "--warmup", "1")
    assert result["settings"]["pipeline"] == 2
    found = result["dpo_lookahead"]
    _check_compared(found, num_steps=2)
    assert {role: len(costs["backward"]) for role, costs in found["costs"].items()} == {
        "actor": 2,
        "reference": 0,
    }
    for costs in found["costs"].values():
        assert all(seconds > 0 for seconds in costs["forward"] + costs["backward"])


def test_emulated_compute_takes_its_time():
    sizes = ("--pipeline", "2", "--ratios", "2", "--backwards", "3", "--forward-ms", "2")
    result = _result("emulated", *sizes, "--steps", "1", "--warmup", "1")
    assert "emulated" in result["compute"]
    [trainings], [steps] = result["two_trainings"], result["dpo_lookahead"]
    assert trainings["bound"] == pytest.approx(27 / 24)
    # M = P = 2, f = 2 ms: (M+P-1)(2f+b), and without the reference's (M+P-1)f.
    assert steps["simulated"]["sequential_seconds"] == pytest.approx(0.030)
    assert steps["simulated"]["time_shared_seconds"] == pytest.approx(0.024)
    for found in (trainings, steps):
        _check_compared(found, num_steps=1)
        for name in ("sequential_seconds", "time_shared_seconds"):  # a sleep is never shorter
            assert found["measured"][name] > found["simulated"][name]


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("real", "--layers", "3"), "--layers 3: give a multiple of --pipeline 2"),
        (("emulated", "--steps", "0"), "--steps: 0: give a positive number"),
    ],
)
def test_a_mistake_is_named(
    arguments: tuple[str, ...],
    named: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    monkeypatch.syspath_prepend(ROOT / "tools")
    main = importlib.import_module("bench_timeshare").main
    with pytest.raises(SystemExit):
        main([*arguments])
    output, errors = capsys.readouterr()
    assert output == ""
    assert named in errors.splitlines()[-1]
