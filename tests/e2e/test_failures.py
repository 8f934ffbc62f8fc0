"""A rank that fails, dies or hangs ends the whole job in seconds, and its own words come first.

One that is stopped or hangs is named; ranks do not outlive their launcher: a few of the trials that
``tools/fault_trials.py`` does at random.
"""

import random
import re
import subprocess
import time
from functools import partial
from pathlib import Path

import pytest

from tests.e2e.launch import SMALL, TRAIN, fork_launcher, launched, launcher_arguments
from tests.fork_server import Process
from tools.fault_jobs import MARK, Job
from tools.fault_trials import GONE_S, disturb, endless, left_after

LIMIT_S = 30.0
STEP, CALL = 1, 6  # the training step (from 0), and the forward of the policy, that go wrong

FAILING = f"""
import ctypes, os, runpy, signal, sys, threading, time
from pathlib import Path

import torch

import puzzle_align.data.loader
from puzzle_align.data.loader import ExampleLoader
from puzzle_align.runtime.liveness import failure

rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
way, num_calls = sys.argv.pop(1), 0


def note_the_time():
    Path(__file__).with_suffix(".time").write_text(str(time.time()))


def before_forward(module, inputs):
    global num_calls
    if type(module).__name__ != "TransformerBlock" or not torch.is_grad_enabled():
        return
    num_calls += 1
    if num_calls != {CALL}:
        return
    if way == "kill" and rank == 0:
        threading.Event().wait()  # as a rank does that waits for a transfer on NCCL
    if rank < world_size - 1:
        return
    note_the_time()
    if way == "raise":
        raise RuntimeError("the device is on fire")
    if way == "value":
        exec("def fail(): raise ValueError('no such row')", vars(puzzle_align.data.loader))
        puzzle_align.data.loader.fail()
    if way == "crash":
        ctypes.string_at(0)
    if way == "exit":
        os._exit(3)
    if way == "kill":
        time.sleep(1)
        os.kill(os.getpid(), signal.SIGKILL)


torch.nn.modules.module.register_module_forward_pre_hook(before_forward)
batch = ExampleLoader.batch


def batch_or_failure(loader, step):
    if way == "read" and step == {STEP} and rank == world_size - 1:
        threading.Thread(target=threading.Event().wait).start()  # does not hold up the end
        note_the_time()
        raise OSError("the disk is gone")
    return batch(loader, step)


ExampleLoader.batch = batch_or_failure


def killed_in(owner, name):
    # Kills the last rank where it calls a function of its own work, outside a step.
    function = getattr(owner, name)

    def kill_last(*args, **named):
        if rank == world_size - 1:
            time.sleep(1)  # the others come as far
            note_the_time()
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*args, **named)

    setattr(owner, name, kill_last)


if way == "leave" and rank == 0:
    from puzzle_align.commands import validate

    validate_job = validate.validate_job
    # As imports do, it holds the interpreter; the other rank goes, and is waited for.
    validate.validate_job = lambda *args: (ctypes.PyDLL(None).sleep(3), validate_job(*args))
if way == "leave" and rank == 1:
    from puzzle_align.cli import train

    read_job = train.read_job
    train.read_job = lambda *args: (time.sleep(1.5), read_job(*args))[1]
if way == "kill_resolving":
    from puzzle_align.stages import run

    killed_in(run, "resolve_engine")
if way == "kill_joining":
    killed_in(torch.distributed, "init_process_group")
if way == "kill_loading":
    from puzzle_align.models.hf.sources import RandomSource

    killed_in(RandomSource, "read")
if way == "kill_noting":
    from puzzle_align.stages.divergence import Divergence

    killed_in(Divergence, "note")
if way == "mistype" and rank == world_size - 1:
    failure.PATIENCE_S = 3.0  # rank 0 goes on, whatever the wait
    note_the_time()
    sys.argv.append("dpo.betta=1")
sys.argv[0] = {str(TRAIN)!r}
runpy.run_path(sys.argv[0], run_name="__main__")
"""

ACTION = r"in action actor:F\d+\.\d \(\d+ of \d+\)"
DEAD = r"rank {} \(process \d+ on \S+\)"
WAYS = {  # the first words of the last rank
    "raise": rf"rank {{}} failed {ACTION}: RuntimeError: the device is on fire",
    "value": rf"rank {{}} failed {ACTION}: ValueError: no such row",
    "crash": rf"{DEAD} (was ended by SIGSEGV|died) {ACTION}",
    "exit": rf"{DEAD} (ended with code 3|died) {ACTION}",
    "kill": rf"{DEAD} (was ended by SIGKILL|died) {ACTION}",
    "read": r"rank {} failed in training step 2: OSError: the disk is gone",
}


def _fail(folder: Path, way: str, ranks: int, *more: str) -> subprocess.CompletedProcess[str]:
    """The job that fails, which has ended in time."""
    script = folder / "failing.py"
    script.write_text(FAILING)
    plan = "actor.parallel.pipeline_model_parallel_size=2"
    job = launched(way, *SMALL, plan, f"output_dir={folder}/out", *more, script=script, ranks=ranks)
    assert time.time() - float(script.with_suffix(".time").read_text()) < LIMIT_S
    assert job.returncode != 0
    return job


# Those kept are a rank that speaks and one that dies; the slow ones do so in other ways.
@pytest.mark.parametrize(
    ("way", "ranks", "placement"),
    [
        pytest.param("raise", 2, "time_shared", marks=pytest.mark.slow),
        ("value", 2, "sequential"),
        pytest.param("crash", 2, "time_shared", marks=pytest.mark.slow),
        ("exit", 2, "time_shared"),
        pytest.param("kill", 4, "time_shared", marks=pytest.mark.slow),
        pytest.param("read", 2, "sequential", marks=pytest.mark.slow),
    ],
)
def test_the_rank_that_failed_is_reported_first(
    tmp_path: Path, way: str, ranks: int, placement: str
) -> None:
    log = _fail(tmp_path, way, ranks, f"placement.reference={placement}").stderr
    speaks = way in ("raise", "value", "read")
    first = re.search("^" + WAYS[way].format(ranks - 1) + "$", log, re.MULTILINE)
    assert first is not None, log
    # A rank that fails speaks before it ends; of one that dies torchrun may hear first.
    too_early = "Traceback|Error|stopped" + "|closing signal" * speaks
    assert not re.search(too_early, log[: first.start()]), log
    assert ("Segmentation fault" in log[: first.start()]) == (way == "crash")
    after = log[first.end() :]
    closing = after[after.index("Root Cause (first observed failure):") :]
    assert f"rank      : {ranks - 1} " in closing
    if speaks:
        assert first.group() in closing
        assert after.startswith("\nTraceback (most recent call last):\n")
    assert after.count("Traceback (most recent") == 1 + speaks  # torchrun's own
    others = "|".join(str(rank) for rank in range(ranks - 1))
    stopped = rf"^rank ({others}) stopped( in action .+)?, because rank {ranks - 1} (failed|died)$"
    assert len(re.findall(stopped, after, re.MULTILINE)) == ranks - 1, log


STARTING = (
    r"rank 0 stopped while it started, because rank 1 \(process \d+\) "
    r"(was ended by SIGKILL|died)"
)
KILLED = rf"{DEAD} (was ended by SIGKILL|died)".format(1)


# Others have each death: amid a step above, before the job is joined here.
@pytest.mark.parametrize(
    ("way", "line"),
    [
        pytest.param("kill_resolving", STARTING, marks=pytest.mark.slow),
        ("kill_joining", STARTING),
        pytest.param("kill_loading", KILLED, marks=pytest.mark.slow),
        pytest.param("kill_noting", rf"{KILLED} in the work after step 1", marks=pytest.mark.slow),
    ],
)
def test_a_rank_that_is_killed_outside_a_step_is_reported(
    tmp_path: Path, way: str, line: str
) -> None:
    log = _fail(tmp_path, way, 2).stderr
    first = re.search(f"^{line}$", log, re.MULTILINE)
    assert first is not None, log
    assert not re.search(r"Traceback|Error|stopped", log[: first.start()]), log
    assert log.count("Traceback (most recent") == 1  # torchrun's own


def test_a_rank_that_leaves_at_its_start_is_not_taken_for_dead(tmp_path: Path) -> None:
    script = tmp_path / "failing.py"
    script.write_text(FAILING)
    out = f"output_dir={tmp_path}/out"
    job = launched("leave", *SMALL, "--validate", out, script=script)
    assert job.returncode == 0 and "because rank" not in job.stderr, job.stderr


def test_a_mistake_on_one_rank_ends_the_job_in_time(tmp_path: Path) -> None:
    log = _fail(tmp_path, "mistype", 2).stderr
    start, error, *_ = log.splitlines()
    assert start.endswith("on 2 ranks: starting"), log
    assert error.startswith("error on rank 1: override 'dpo.betta=1': unknown key"), log
    assert log.count("Traceback (most recent") == 1  # torchrun's own


TIMEOUT_S = 6.0
NOT_JOINED = r"\(.*process.*\) has not (joined the job|answered) for 6 s: it is stopped"
STOPPED = r"\(process \d+ on \S+\) has not answered for 6 s: it is stopped in \w+"
HUNG = r"failed in \w.+: others wait for it, and it has done nothing new for 6 s"


def _start(job: Job) -> Process:
    """Start the job without imports."""
    asked = (*launcher_arguments(job.ranks), str(job.script), "--config", str(job.config))
    environment = {MARK: job.mark, "FAULT": str(job.output_dir), "GLOO_SOCKET_IFNAME": "lo"}
    with job.log.open("a") as log:
        return fork_launcher(job.output_dir.with_suffix(".call"), asked, environment, log, log)


# The slow ones are stopped, and known by a simpler sign: they do not answer at all.
@pytest.mark.parametrize(
    ("name", "fault", "moment", "victim", "said"),
    [
        pytest.param("dpo", "STOP", "start", 1, NOT_JOINED, marks=pytest.mark.slow),  # its imports
        pytest.param(  # rank 1 waits for the responses
            *("ppo_apart", "STOP", "generation", 0, STOPPED), marks=pytest.mark.slow
        ),
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


@pytest.mark.parametrize("moment", [pytest.param("start", marks=pytest.mark.slow), "step"])
def test_ranks_end_with_their_launcher(tmp_path: Path, moment: str) -> None:
    job = endless(tmp_path / "out", "dpo")
    running = _start(job)
    try:
        happened = job.metrics.exists if moment == "step" else partial(job.rank_process, 1)
        job.wait_until(happened, lambda: running.poll() is not None)
        assert job.rank_process(1) is not None  # it would be seen if it were left
        running.kill()
        running.wait()
        assert left_after(job, GONE_S) == []
    finally:
        job.kill()


def test_torchrun_s_restart_goes_on_from_the_last_checkpoint(tmp_path: Path) -> None:
    """Its ranks meet in the store that the first start has used."""
    killing = tmp_path / "killing.py"
    killing.write_text(
        "import os, runpy, signal, sys, time\n"
        "if os.environ['RANK'] == '1' and os.environ['TORCHELASTIC_RESTART_COUNT'] == '1':\n"
        "    time.sleep(2)  # rank 0 is there first, and finds what was left in the store\n"
        "from puzzle_align.stages.divergence import Divergence\n"
        "note = Divergence.note\n"
        "def note_or_die(self, step, updates):\n"
        "    last = os.environ['RANK'] == '1' and os.environ['TORCHELASTIC_RESTART_COUNT'] == '0'\n"
        "    if last and step == 3:\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
        "    note(self, step, updates)\n"
        "Divergence.note = note_or_die\n"
        f"sys.argv[0] = {str(TRAIN)!r}\n"
        "runpy.run_path(sys.argv[0], run_name='__main__')\n"
    )
    log = tmp_path / "log"
    keys = (*SMALL, "max_steps=4", "checkpoint.save_every=2", "telemetry.tensorboard=false")
    arguments = (*launcher_arguments(2), "--max-restarts", "1", str(killing), *keys)
    with log.open("w") as file:
        launcher = fork_launcher(
            tmp_path / "call",
            (*arguments, f"output_dir={tmp_path / 'out'}"),
            {"GLOO_SOCKET_IFNAME": "lo"},
            file,
            file,
        )
        try:
            assert launcher.wait(2 * LIMIT_S) == 0, log.read_text()
        finally:
            launcher.kill()
    assert "resumed from step 2 of 4" in log.read_text()
