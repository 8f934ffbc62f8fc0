"""A thousand cases of every kind of foreign file end in one line, or in what the file says."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fuzz.harness import GOOD, kind_names

CASES = 1000
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def running():
    """All kinds at once, each in a process that has computed nothing: it forks."""
    own = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "tests.fuzz", "--json", "--cases", str(CASES)]
    started = {
        name: subprocess.Popen(
            [*command, name], cwd=ROOT, env=own, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        for name in kind_names()
    }
    yield started
    for process in started.values():
        process.kill()
        process.wait()


@pytest.mark.parametrize("name", kind_names())
def test_cases_end_in_one_line_or_in_what_the_file_says(running, name):
    out, errors = running[name].communicate(timeout=500)
    assert out, errors.decode()
    report = json.loads(out)[name]
    assert not report["findings"], "\n".join(report["findings"][:20])
    assert sum(report["counts"].get(outcome, 0) for outcome in GOOD) == CASES
    assert report["counts"].get("refused", 0) > CASES // 20  # the damage is damage
