"""Cases of every kind of foreign file end in one line, or in what the file says."""

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from tests.e2e.launch import ROOT, python_path
from tests.fuzz.harness import GOOD, kind_names

CASES = 80


@pytest.fixture(scope="module")
def reports() -> dict[str, Any]:
    """Reports by kind; the fuzzers run in a process that has computed nothing, for it forks."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.fuzz", "--cases", str(CASES)],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": python_path()},
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.stdout, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("name", kind_names())
def test_cases_end_in_one_line_or_in_what_the_file_says(reports: dict[str, Any], name: str) -> None:
    report = reports[name]
    assert not report["findings"], "\n".join(report["findings"][:20])
    assert sum(report["counts"].get(outcome, 0) for outcome in GOOD) == CASES
    assert report["counts"].get("refused", 0) > CASES // 20  # the damage is damage
