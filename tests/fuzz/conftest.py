"""Runs the fuzzers side by side, and beside the tests of the other worker."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

CASES = 250
ROOT = Path(__file__).parents[2]
_running: dict[str, subprocess.Popen[bytes]] = {}


def pytest_sessionfinish() -> None:
    """End those that were not waited for."""
    for process in _running.values():
        process.kill()
        process.wait()


def _start(name: str) -> subprocess.Popen[bytes]:
    """Start a fuzzer in a process that has computed nothing: it forks."""
    command = ["nice", "-n", "19", sys.executable, "-m", "tests.fuzz", "--json"]
    return subprocess.Popen(
        [*command, "--cases", str(CASES), name],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


@pytest.fixture
def running(request: pytest.FixtureRequest) -> dict[str, subprocess.Popen[bytes]]:
    """The processes, by what they fuzz: all that are asked for start with the first one's test.

    They take what others leave of the processors. Cases are timed without what they wait for them.
    """
    for item in request.session.items:
        if isinstance(item, pytest.Function) and item.path.name == "test_fuzz.py":
            name = str(item.callspec.params["name"])
            if name not in _running:
                _running[name] = _start(name)
    return _running
