"""Reward functions in their own process: what they may do to it, and what the rank then says."""

import math
import os
import pickle
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
import psutil
import pytest

from puzzle_align.config.schema import LONGEST_WAIT
from puzzle_align.config.sections.models import RewardConfig
from puzzle_align.runtime.liveness.failure import CannotGoOn
from puzzle_align.stages.rl import reward_functions
from puzzle_align.stages.rl.reward_calls import Completions, Judged, TrainerState
from puzzle_align.stages.rl.reward_function import Signature
from puzzle_align.stages.rl.reward_functions import RewardFunctions, open_functions
from puzzle_align.stages.rl.reward_process import RewardProcess
from tests.unit import grpo_rewards
from tests.unit.test_reward_functions import completions, functions

GIVEN = Completions(["p", "q", "r"], ["a", "bb", ""], [[1], [2, 3], [4]], {})
STATE = TrainerState(global_step=3, max_steps=12, epoch=0.25)
OWN = "tests.unit.own_process"
# The guard, the process itself, two workers, one that sleeps, and two of sessions of their own.
NUM_OF_POOL = 7


def started(*names: str, timeout: float | None = 60.0) -> RewardProcess:
    return RewardProcess([f"{OWN}:{name}" for name in names], timeout)


def called(*names: str, times: int = 1) -> Judged:
    process = started(*names)
    judged = [process(GIVEN, STATE) for _ in range(times)]
    process.close()
    return judged[-1]


def below_guard(process: RewardProcess) -> psutil.Process:
    """The process that calls the functions."""
    children = psutil.Process(process._process.pid).children()  # with what became the guard's own
    return min(children, key=psutil.Process.create_time)


def marked(mark: str) -> list[psutil.Process]:
    """The processes that have not ended, of those that inherited the mark in ``MARK``."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            own = process.environ().get("MARK") == mark
            found += [process] * (own and process.status() != psutil.STATUS_ZOMBIE)
    return found


def end(mark: str) -> bool:
    """Whether the processes with the mark end soon."""
    deadline = time.monotonic() + 10
    while marked(mark) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not marked(mark)


@pytest.mark.parametrize("conversational", [False, True])
def test_what_functions_give_is_what_they_give_in_this_process(conversational: bool) -> None:
    names = [f"{grpo_rewards.__name__}:{name}" for name in ("right", "marked", "short", "judged")]
    process = RewardProcess(names, 60.0)
    here, given = functions("right", "marked", "short", "judged"), completions(conversational)
    for step in range(2):
        state = TrainerState(step, 12, 0.25)
        own, there = here(given, state), process(given, state)
        np.testing.assert_array_equal(there.rewards, own.rewards)
        assert (there.extra, there.metrics) == (own.extra, own.metrics)
    signatures = [found for found in process.loaded if isinstance(found, Signature)]
    assert RewardFunctions(RewardConfig(), signatures, process).names == here.names
    process.close()


def test_functions_keep_what_they_keep_and_the_rank_what_it_has(capfd) -> None:
    folder, handler = os.getcwd(), signal.getsignal(signal.SIGTERM)
    judged = called("counts", "spoils", "asks", times=3)
    np.testing.assert_array_equal(judged.rewards[:, 0], [3.0] * 3)
    np.testing.assert_array_equal(judged.rewards[:, 1], [math.nan, 1e-300, 0.1 + 0.2])
    assert judged.metrics == {"calls": [2.0]}
    assert judged.extra == {"object": ["<class 'object'>", "{'a': nan}", 3]}
    assert (os.getcwd(), signal.getsignal(signal.SIGTERM)) == (folder, handler)
    assert os.environ.get("RANK") != "7"
    assert capfd.readouterr().out == "half a lineTrue False 3\n" * 3


def test_a_process_starts_in_no_time() -> None:
    """It imports neither torch nor Megatron: those take seconds."""
    start = time.monotonic()
    started("counts", timeout=LONGEST_WAIT).close()
    assert time.monotonic() - start < 3


def test_what_cannot_be_called_is_told_of_each() -> None:
    names = ["nowhere:f", f"{OWN}:NUM_CALLS", f"{OWN}:counts", "tests.unit.leaving_rewards:f"]
    process = RewardProcess(names, 60.0)
    process.close()
    first, second, third, last = process.loaded
    assert str(first).startswith("reward.function=nowhere:f: no module 'nowhere' installed or in ")
    assert str(second).startswith(f"reward.function={OWN}:NUM_CALLS: is int, not a function; ")
    assert isinstance(third, Signature) and third.own_name == "counts"
    assert "tests.unit.leaving_rewards cannot be imported: SystemExit: no GPU (" in str(last)


def test_an_import_that_fails_ends_the_job_with_its_traceback(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(  # of another rank, which had the completions
        reward_functions, "gather_everywhere", lambda found: [(), pickle.loads(pickle.dumps(found))]
    )
    config = RewardConfig(function="tests.unit.leaving_rewards:f", timeout=60.0)
    with pytest.raises(CannotGoOn, match="cannot be imported: SystemExit: no GPU") as error:
        open_functions(config, has_completions=True)
    file = Path(__file__).parent / "leaving_rewards.py"
    assert f"({file}:" in str(error.value)
    assert f'File "{file}", line ' in error.value.details
    assert error.value.details.rstrip().endswith("SystemExit: no GPU")


def test_a_long_text_of_an_error_is_cut_and_its_place_is_not() -> None:
    process = started("raises_at_length")
    with pytest.raises(CannotGoOn) as error:
        process(GIVEN, STATE)
    details = error.value.details
    assert len(details) < 21_000 and "in raises_at_length" in details
    assert details.rstrip().endswith("xxx, and no more'")


@pytest.mark.parametrize(
    ("name", "said", "details"),
    [
        ("raises", f"KeyError: 'no such' ({Path(__file__).parent}/own_process.py:", "in raises"),
        ("leaves", "SystemExit: 3 (", "sys.exit(3)"),
        ("exits", "its process ended with code 0: look at what it calls, and at the memory", ""),
        ("killed", "its process was ended by SIGKILL: look at", ""),
        ("crashes", "its process was ended by SIGSEGV: look at", "in crashes"),
        ("closes", "its process has spoilt its connection to the rank: look at", ""),
        ("babbles", "its process has spoilt its connection to the rank: look at", ""),
        ("hangs", "no answer within 1.0 s; mend it, or raise reward.timeout", "in hangs"),
        ("deaf", "no answer within 1.0 s; mend it, or raise reward.timeout", ""),
        ("awaits", "no answer within 1.0 s; mend it, or raise reward.timeout", "in select"),
    ],
)
def test_a_process_that_a_function_ends_or_holds_is_one_line(name, said, details) -> None:
    process = started("counts", name)
    if "1.0 s" in said:  # of the call alone: other work may hold up the start
        process._timeout = 1.0
    with pytest.raises(CannotGoOn) as error:
        process(GIVEN, STATE)
    line = str(error.value)
    assert line.startswith(f"reward.function={OWN}:{name}: {said}") and len(line) < 300
    assert details in error.value.details and bool(details) == bool(error.value.details)


def test_a_process_that_is_gone_between_two_calls_is_any_function_s() -> None:
    process = started("counts", "asks")
    below_guard(process).send_signal(40)  # of real time: it has no name
    os.waitid(os.P_PID, process._process.pid, os.WEXITED | os.WNOWAIT)
    with pytest.raises(CannotGoOn, match=f"{OWN}:counts, {OWN}:asks: .* was ended by signal 40:"):
        process(GIVEN, STATE)


def test_a_fork_that_returns_too_says_nothing() -> None:
    assert called("forks", "counts", times=3).rewards.tolist() == [[0.0, 3.0]] * 3


def test_much_is_said_and_asked_without_waiting_for_each_other() -> None:
    """Messages of more than what lies between the two: a socket's buffers."""
    n = 20_000
    many = Completions(["p" * 100] * n, ["c"] * n, [[1] * 10] * n, {"answer": ["x" * 100] * n})
    process = started("counts")
    assert process(many, STATE).rewards.tolist() == [[1.0]] * n
    process.close()


@pytest.mark.parametrize("end_by", ["close", "exits", "SIGKILL"])
def test_what_functions_started_ends_with_them(
    end_by: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mark = str(tmp_path)
    monkeypatch.setenv("MARK", mark)
    process = started("pool", *["exits"] * (end_by == "exits"))
    if end_by == "exits":
        with pytest.raises(CannotGoOn, match="ended with code 0"):
            process(GIVEN, STATE)
        assert marked(mark) == []  # at once: none is left when the rank goes on
        return
    process(GIVEN, STATE)
    assert len(marked(mark)) == NUM_OF_POOL
    if end_by == "close":
        process.close()
        assert marked(mark) == []
    else:
        below_guard(process).kill()
        assert end(mark)


def test_what_functions_started_ends_with_the_rank_that_is_killed(tmp_path: Path) -> None:
    notes, mark = tmp_path / "notes", str(tmp_path)
    call = (
        "from tests.unit.test_reward_process import GIVEN, STATE, started;"
        "started('stuck_pool', timeout=None)(GIVEN, STATE)"
    )
    own = {"NOTES": str(notes), "MARK": mark}
    rank = subprocess.Popen([sys.executable, "-c", call], env={**os.environ, **own})
    while not notes.exists():
        assert rank.poll() is None
        time.sleep(0.02)
    assert len(marked(mark)) == NUM_OF_POOL + 1
    rank.kill()
    rank.wait()
    assert end(mark)
