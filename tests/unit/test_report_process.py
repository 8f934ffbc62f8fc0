"""Parts of a report that fail in every way: their results stay, and the other parts run."""

import importlib
import os
import subprocess
import time
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.dist.spawn import run_alone
from tests.e2e.launch import ROOT

Found = dict[str, Any]
Run = Callable[..., list[Found]]
Save = Callable[[Found], None]


def _raises(setting: int, save: Save) -> None:
    save({"half": setting})
    raise ValueError("two\nlines")


def _dies(setting: int, save: Save) -> None:
    print("last words", flush=True)
    os._exit(3)


def _works(setting: int, save: Save) -> None:
    save({"whole": setting})


def _hangs(setting: int, save: Save) -> None:
    """Wait for a worker in a session of its own."""
    worker = subprocess.Popen(["sleep", "60"], start_new_session=True)
    save({"worker": worker.pid})
    worker.wait()


class _Model:
    def __init__(self) -> None:
        self.itself = self


_models: list[weakref.ref[_Model]] = []


def _holds(setting: int, save: Save) -> None:
    model = _Model()
    _models.append(weakref.ref(model))
    raise ValueError("out of memory")


def _counts(setting: int, save: Save) -> None:
    save({"alive": sum(model() is not None for model in _models)})


PARTS = {p.__name__[1:]: p for p in (_raises, _dies, _works, _hangs, _holds, _counts)}


def _run(names: tuple[str, ...], limit: float, seconds: float, folder: Path) -> list[Found]:
    process = importlib.import_module("report.process")
    work = partial(process.run_parts, parts=PARTS, setting=7, folder=folder)
    deadline = time.monotonic() + seconds
    process.run_isolated(dict.fromkeys(names, limit), work, folder, deadline)
    return list(process.read_parts(names, folder).values())


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run parts from a process that may be forked: it has not used torch."""
    monkeypatch.syspath_prepend(ROOT / "tools")

    def run_named(*names: str, limit: float = 30.0, seconds: float = 60.0) -> list[Found]:
        return run_alone(_run, names, limit, seconds, tmp_path)

    return run_named


def test_parts_that_raise_or_die_leave_the_others_alone(run: Run) -> None:
    raised, died, worked = run("raises", "dies", "works")
    assert (raised["status"], raised["error"]) == ("failed", "ValueError: two lines")
    assert raised["half"] == 7
    assert raised["last_output"][0] == "Traceback (most recent call last):"
    assert raised["last_output"][-2:] == ["ValueError: two", "lines"]  # and nothing of the next
    assert (died["status"], died["error"]) == ("failed", "its process ended with 3")
    assert died["last_output"] == ["last words"]
    assert (worked["status"], worked["whole"]) == ("done", 7)


def test_a_failed_part_s_models_are_gone_when_the_next_begins(run: Run) -> None:
    held, counted = run("holds", "counts")
    assert (held["error"], counted["alive"]) == ("ValueError: out of memory", 0)


def test_a_part_is_ended_at_its_limit_with_its_workers(run: Run) -> None:
    hung, worked = run("hangs", "works", limit=3.0)
    assert (hung["status"], hung["error"]) == ("failed", "it took longer than its 3 s")
    for _ in range(50):  # until whoever adopted the worker has waited for it
        if not psutil.pid_exists(hung["worker"]):
            break
        time.sleep(0.1)
    assert not psutil.pid_exists(hung["worker"])
    assert worked["status"] == "done"


def test_parts_without_time_left_say_so(run: Run) -> None:
    hung, left = run("hangs", "works", seconds=2.0)
    assert hung["error"] == "the time of the whole report was spent"
    assert (left["status"], left["error"]) == ("failed", "the time was spent before it began")
