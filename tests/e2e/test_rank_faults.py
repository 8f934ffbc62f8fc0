"""A rank that is stopped or hangs is named; ranks do not outlive their launcher.

A few of the trials that ``tools/fault_trials.py`` does at random.
"""

import random
import re
from functools import partial
from pathlib import Path

import pytest

from tests.e2e.launch import fork_launcher, launcher_arguments
from tests.fork_server import Process
from tools.fault_jobs import MARK, Job
from tools.fault_trials import GONE_S, disturb, endless, left_after

TIMEOUT_S = 6.0
STARTING = r"\(.*process.*\) has not (joined the job|answered) for 6 s: it is stopped"
STOPPED = r"\(process \d+ on \S+\) has not answered for 6 s: it is stopped in \w+"
HUNG = r"failed in \w.+: others wait for it, and it has done nothing new for 6 s"


def _start(job: Job) -> Process:
    """As the job starts itself, without imports."""
    asked = (*launcher_arguments(job.ranks), str(job.script), "--config", str(job.config))
    environment = {MARK: job.mark, "FAULT": str(job.output_dir), "GLOO_SOCKET_IFNAME": "lo"}
    with job.log.open("a") as log:
        return fork_launcher(job.output_dir.with_suffix(".call"), asked, environment, log, log)


@pytest.mark.parametrize(
    ("name", "fault", "moment", "victim", "said"),
    [
        ("dpo", "STOP", "start", 1, STARTING),
        ("ppo_apart", "STOP", "generation", 0, STOPPED),  # rank 1 waits for the responses
        ("ppo_apart", "hang", "step", 1, HUNG),
    ],
)
def test_a_rank_that_does_not_go_on_is_named(
    tmp_path: Path,
    name: str,
    fault: str,
    moment: str,
    victim: int,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    job = endless(tmp_path / "out", name, TIMEOUT_S)
    if moment != "start":  # which is stopped amid its imports
        monkeypatch.setattr(job, "start", partial(_start, job))
    try:
        found = disturb(job, fault, victim, moment, random.Random(1), TIMEOUT_S)
    finally:
        job.kill()
    assert found["wrong"] == [], found["told"]
    assert re.search(f"^rank {victim} {said}", job.log.read_text(), re.MULTILINE), job.told()


@pytest.mark.parametrize("moment", ["start", "step"])
def test_ranks_end_with_their_launcher(tmp_path: Path, moment: str) -> None:
    job = endless(tmp_path / "out", "dpo")
    running = _start(job)
    try:
        happened = job.metrics.exists if moment == "step" else partial(job.rank_process, 1)
        job.wait_until(happened, lambda: running.poll() is not None)
        running.kill()
        running.wait()
        assert left_after(job, GONE_S) == []
    finally:
        job.kill()
