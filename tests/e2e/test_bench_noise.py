"""tools/bench_noise.py at its smallest: its JSON is whole and its figures agree."""

import json

import pytest

from tests.e2e.launch import ROOT, run_tool


def test_ratios_are_of_the_same_draws():
    sizes = ("--pipeline", "2", "--multiples", "1", "4", "--ratios", "2", "--draws", "50")
    dpo = ("--references", "1", "--backwards", "2", "--noise", "0.1", "0.3")
    done = run_tool(ROOT / "tools" / "bench_noise.py", *sizes, *dpo)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    cases = result["cases"]
    kinds = ["two_trainings", "two_trainings_head", "beside", "dpo_lookahead", "dpo_lookahead_head"]
    assert [(c["kind"], c["microbatches"], c["noise"]) for c in cases] == [
        (kind, count, noise) for count in (2, 8) for kind in kinds for noise in (0.1, 0.3)
    ]
    for case in cases:
        assert case["mean"] > 0 and case["standard_error"] >= 0 and case["composing"] > 0
        assert 0.8 < case["ratio"] < 1.1 and 0.8 < case["exact_ratio"] < 1.1
        if case["exact_ratio"] == case["choice_ratio"] == 1.0:  # hardly another list, then
            assert case["ratio"] == pytest.approx(1.0, abs=0.05)
    for row in result["summary"]:
        own = [c["ratio"] for c in cases if (c["kind"], c["noise"]) == (row["kind"], row["noise"])]
        assert row["cases"] == len(own) == 2
        assert (row["best"], row["worst"]) == (min(own), max(own))
        assert row["mean"] == pytest.approx(sum(own) / 2)
