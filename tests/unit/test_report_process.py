"""Parts of a report that fail in every way: what they found stays, and the others run."""

import importlib
import os
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
import os, subprocess, sys, time, weakref
from pathlib import Path
sys.path.insert(0, {str(ROOT / "tools")!r})
import report_process
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

class Model: pass
models = []

def holds(setting, save):
    model = Model()
    model.itself = model
    models.append(weakref.ref(model))
    raise ValueError("out of memory")

def counts(setting, save):
    save({{"alive": sum(model() is not None for model in models)}})

def breaks(setting, save):
    report_process.free_device = lambda: sys.exit(1)

def launches(setting, save):
    worker = subprocess.Popen(["sleep", "60"], start_new_session=True)
    save({{"worker": worker.pid}})
    worker.wait()

own = (raises, hangs, dies, works, holds, counts, breaks, launches)
parts = {{f.__name__: Part("", 0.0, f) for f in own}}
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


def test_a_device_that_is_beyond_use_costs_the_next_part_nothing(run: Run):
    broke, worked = run("breaks", "works")
    assert (broke["status"], worked["status"]) == ("done", "done")


def test_what_a_failed_part_made_is_gone_when_the_next_begins(run: Run):
    held, counted = run("holds", "counts")
    assert (held["error"], counted["alive"]) == ("ValueError: out of memory", 0)


def test_a_part_that_is_ended_leaves_no_worker(run: Run):
    (launched,) = run("launches", limit=1.0)
    assert launched["status"] == "failed"
    with pytest.raises(ProcessLookupError):
        for _ in range(50):  # until whoever adopted it has taken note of its end
            os.kill(launched["worker"], 0)
            time.sleep(0.1)


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
