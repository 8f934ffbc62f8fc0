"""Parts of a report that fail in every way: what they found stays, and the others run."""

import importlib
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.launch import ROOT

Found = dict[str, Any]
Run = Callable[..., list[Found]]
# The process of the parts: FOLDER NAME,NAME,...
SCRIPT = f"""
import os, sys, time
from pathlib import Path
sys.path.insert(0, {str(ROOT / "tools")!r})
from report_process import Part, run_parts

def raises(setting, save):
    save({{"half": setting}})
    raise ValueError("two\\nlines")

def hangs(setting, save):
    save({{"half": setting}})
    time.sleep(60)

def dies(setting, save):
    print("last words", flush=True)
    os._exit(3)

def works(setting, save):
    save({{"whole": setting}})

parts = {{f.__name__: Part("", 0.0, f) for f in (raises, hangs, dies, works)}}
names = sys.argv[2].split(",")
run_parts(names, parts, 7, Path(sys.argv[1]))
"""


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.syspath_prepend(ROOT / "tools")
    process = importlib.import_module("report_process")
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    command = [sys.executable, str(script), str(tmp_path)]

    def run_named(*names: str, limit: float = 30.0, seconds: float = 60.0) -> list[Found]:
        deadline = time.monotonic() + seconds
        process.run_isolated(names, dict.fromkeys(names, limit), command, tmp_path, deadline)
        return list(process.read_parts(names, tmp_path).values())

    return run_named


def test_parts_that_raise_or_die_leave_the_others_alone(run: Run):
    raised, died, worked = run("raises", "dies", "works")
    assert (raised["status"], raised["error"]) == ("failed", "ValueError: two lines")
    assert raised["half"] == 7
    assert (died["status"], died["error"]) == ("failed", "its process ended with 3")
    assert died["last_output"][-1] == "last words"
    assert (worked["status"], worked["whole"]) == ("done", 7)


def test_a_part_is_ended_at_its_limit(run: Run):
    hung, worked = run("hangs", "works", limit=1.0)
    assert (hung["status"], hung["error"]) == ("failed", "it took longer than its 1 s")
    assert hung["half"] == 7
    assert worked["status"] == "done"


def test_what_there_is_no_time_for_is_said(run: Run):
    hung, left = run("hangs", "works", seconds=2.0)
    assert hung["error"] == "the time of the whole report was spent"
    assert (left["status"], left["error"]) == ("failed", "the time was spent before it began")


@pytest.mark.parametrize("name", ["works", "raises"])
def test_one_part_alone(name: str, run: Run):
    (found,) = run(name)
    assert found["status"] == ("done" if name == "works" else "failed")
    assert found["seconds"] >= 0
