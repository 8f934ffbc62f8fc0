"""Reward functions in their own process: what they may do to it, and what the rank then says."""

import math
import os
import pickle
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
import psutil
import pytest

from puzzle_align.config.sections.models import RewardConfig
from puzzle_align.runtime.liveness.failure import CannotGoOn
from puzzle_align.stages.rewards.functions import Completions, Result, TrainerState
from puzzle_align.stages.rewards.worker import RewardWorker
from puzzle_align.stages.rl import rewards
from puzzle_align.stages.rl.rewards import open_functions
from tests.unit.test_reward_functions import NAMES, completions, functions

GIVEN = Completions(["p", "q", "r"], ["a", "bb", ""], [[1], [2, 3], [4]], {})
STATE = TrainerState(global_step=3, max_steps=12, epoch=0.25)
MODULE = "tests.unit.process_rewards"
NUM_OF_POOL = 5  # the process itself, two workers, and a program of each of two ways to start one


def started(*names: str, timeout: float | None = 60.0) -> RewardWorker:
    return RewardWorker([f"{MODULE}:{name}" for name in names], timeout)


def called(*names: str, times: int = 1) -> list[Result]:
    worker = started(*names)
    results = [worker(GIVEN, STATE) for _ in range(times)]
    worker.close()
    return results[-1]


def marked(mark: str) -> list[psutil.Process]:
    """The processes that have not ended, of those that inherited the mark in ``MARK``."""
    processes = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            has_mark = process.environ().get("MARK") == mark
            processes += [process] * (has_mark and process.status() != psutil.STATUS_ZOMBIE)
    return processes


def end(mark: str) -> bool:
    """Whether the processes with the mark end soon."""
    deadline = time.monotonic() + 10
    while marked(mark) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not marked(mark)


@pytest.mark.parametrize("conversational", [False, True])
def test_results_are_those_of_a_call_in_this_process(conversational: bool) -> None:
    worker = RewardWorker([f"tests.unit.grpo_rewards:{name}" for name in NAMES], 60.0)
    here, given = functions(*NAMES), completions(conversational)
    assert worker.signatures == here.signatures
    assert here.call is not None
    for step in range(2):
        state = TrainerState(step, 12, 0.25)
        for ours, theirs in zip(here.call(given, state), worker(given, state), strict=True):
            np.testing.assert_array_equal(theirs.rewards, ours.rewards)
            assert (theirs.extra, theirs.metrics) == (ours.extra, ours.metrics)
    worker.close()


def test_functions_keep_their_state_and_the_rank_its_own(capfd: pytest.CaptureFixture) -> None:
    folder, handler = os.getcwd(), signal.getsignal(signal.SIGTERM)
    counts, spoils, _ = called("counts", "spoils", "asks", times=3)
    assert counts.rewards.tolist() == [3.0] * 3
    np.testing.assert_array_equal(spoils.rewards, [math.nan, 1e-300, 0.1 + 0.2])
    assert spoils.metrics == {"calls": [2.0]}
    assert spoils.extra == {"object": ["<class 'object'>", "{'a': nan}", 3]}
    assert (os.getcwd(), signal.getsignal(signal.SIGTERM)) == (folder, handler)
    assert os.environ.get("RANK") != "7"
    assert capfd.readouterr().out == "half a lineTrue False 3\n" * 3


def test_a_failing_import_ends_the_job_with_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(  # of another rank, which had the completions
        rewards, "gather_everywhere", lambda own: [(None, []), pickle.loads(pickle.dumps(own))]
    )
    config = RewardConfig(function=[f"{MODULE}:counts", "tests.unit.leaving_rewards:f"])
    with pytest.raises(CannotGoOn, match="cannot be imported: SystemExit: no GPU") as error:
        open_functions(config, has_completions=True)
    file = Path(__file__).parent / "leaving_rewards.py"
    assert f"({file}:5)" in str(error.value)
    assert f'File "{file}", line 5' in error.value.details
    assert error.value.details.rstrip().endswith("SystemExit: no GPU")


LATE = "no answer within 1.0 s; fix it, or raise reward.timeout"
BROKEN = "look at what it calls, and at the memory"


@pytest.mark.parametrize(
    ("name", "said", "details"),
    [
        ("raises", "KeyError: 'no such'", "in raises"),
        ("leaves", "SystemExit: 3", "sys.exit(3)"),
        ("exits", f"its process ended with code 0: {BROKEN}", ""),
        ("killed", f"its process was ended by SIGKILL: {BROKEN}", ""),
        ("crashes", f"its process was ended by SIGSEGV: {BROKEN}", "in crashes"),
        ("closes", f"its process has closed its connection to the rank: {BROKEN}", ""),
        ("exits_with_a_pool", f"its process ended with code 0: {BROKEN}", ""),
        ("hangs", LATE, "in hangs"),
        ("deaf", LATE, ""),
        ("awaits", LATE, "in select"),
    ],
)
def test_what_ends_or_holds_the_process_is_one_line(name: str, said: str, details: str) -> None:
    worker = started("counts", "asks", name)
    if said == LATE:  # of the call alone: other work may hold up the start
        worker._timeout = 1.0
    with pytest.raises(CannotGoOn) as error:
        worker(GIVEN, STATE)
    file = Path(__file__).parent / "process_rewards.py"
    line = re.escape(f"reward.function={MODULE}:{name}: {said} ({file}:") + r"\d+\)"
    assert re.fullmatch(line, str(error.value))
    assert details in error.value.details and bool(details) == bool(error.value.details)


def test_a_process_that_ends_between_two_calls_is_reported_at_the_next() -> None:
    worker = started("counts", "asks")
    worker._process.send_signal(40)  # of real time: it has no name
    with pytest.raises(CannotGoOn, match=f"{MODULE}:counts: its process was ended by signal 40:"):
        worker(GIVEN, STATE)


def test_large_requests_and_answers_do_not_wait_for_each_other() -> None:
    """Messages of more than what lies between the two: a socket's buffers."""
    n = 20_000
    many = Completions(["p" * 100] * n, ["c"] * n, [[1] * 10] * n, {"answer": ["x" * 100] * n})
    worker = started("counts")
    assert worker(many, STATE)[0].rewards.tolist() == [1.0] * n
    worker.close()


@pytest.mark.parametrize("end_by", ["close", "time-out", "SIGKILL"])
def test_what_functions_started_ends_with_their_process(
    end_by: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MARK", str(tmp_path))
    worker = started("pool", *["hangs"] * (end_by == "time-out"))
    if end_by == "time-out":
        worker._timeout = 2.0
        with pytest.raises(CannotGoOn, match=r"no answer within 2.0 s"):
            worker(GIVEN, STATE)
    else:
        worker(GIVEN, STATE)
        assert len(marked(str(tmp_path))) == NUM_OF_POOL
        if end_by == "SIGKILL":  # of the process, as by the kernel where memory ends
            worker._process.kill()
        worker.close()
    assert end(str(tmp_path))


def test_what_functions_started_ends_with_the_rank_that_is_killed(tmp_path: Path) -> None:
    """Also while a function holds the interpreter and has all signals blocked."""
    notes, mark = tmp_path / "notes", str(tmp_path)
    call = (
        "from tests.unit.test_reward_worker import GIVEN, STATE, started;"
        "started('stuck_pool', timeout=None)(GIVEN, STATE)"
    )
    environment = {**os.environ, "NOTES": str(notes), "MARK": mark}
    rank = subprocess.Popen([sys.executable, "-c", call], env=environment)
    while not notes.exists():
        assert rank.poll() is None
        time.sleep(0.02)
    assert len(marked(mark)) == NUM_OF_POOL + 1
    rank.kill()
    rank.wait()
    assert end(mark)
