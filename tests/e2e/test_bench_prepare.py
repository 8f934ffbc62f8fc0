"""tools/bench_prepare.py at its smallest: its JSON is whole, and every process is measured."""

import json

from tests.e2e.launch import ROOT, run_tool


def test_a_preparation_and_the_start_after_it_are_measured(tmp_path):
    options = ("--pairs", "20000", "--num-proc", "2", "--folder", str(tmp_path))
    done = run_tool(ROOT / "tools" / "bench_prepare.py", *options)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    case = result["2 processes"]
    assert case["workers"] == 2 and case["pairs_a_second"] > 0
    assert 20 < case["peak_mib_of_a_worker"] < 2048 and 20 < case["peak_mib"] < 2048
    assert result["start of another rank"]["gigabytes_a_second"] == 0
    assert result["start of rank 0"]["seconds"] > 0
    assert not list(tmp_path.iterdir())
