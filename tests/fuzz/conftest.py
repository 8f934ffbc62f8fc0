"""Runs the fuzzers beside the other tests, which leave the processors idle much of the time."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

CASES = 1000
ROOT = Path(__file__).parents[2]
_running: dict[str, subprocess.Popen[bytes]] = {}


def pytest_collection_finish(session: pytest.Session) -> None:
    """Start those that are asked for, each in a process that has computed nothing: it forks.

    They take what others leave of the processors. Cases are timed without what they wait for them.
    """
    if session.config.option.collectonly or session.config.option.setuponly:
        return
    own = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = ["nice", "-n", "19", sys.executable, "-m", "tests.fuzz", "--json"]
    for item in session.items:
        if not isinstance(item, pytest.Function) or item.path.name != "test_fuzz.py":
            continue
        name = str(item.callspec.params["name"])
        _running[name] = subprocess.Popen(
            [*command, "--cases", str(CASES), name],
            cwd=ROOT,
            env=own,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )


def pytest_sessionfinish() -> None:
    """End those that were not waited for."""
    for process in _running.values():
        process.kill()
        process.wait()


@pytest.fixture
def running() -> dict[str, subprocess.Popen[bytes]]:
    """The processes, by what they fuzz."""
    return _running
