"""Disturb tiny jobs at random moments, and check how they end.

    python tools/fault_trials.py kills --count 100 --seed 1 --output kills.jsonl
    python tools/fault_trials.py ranks --count 50 --seed 1 --output ranks.jsonl
    python tools/fault_trials.py launchers --count 20 --seed 1 --output launchers.jsonl

kills: the launcher and all ranks are killed at once, one to three times a run. About half of the
kills come soon after a random step, the others at any moment (most of a short run is its start).
The run is then resumed to its end and compared bitwise with an undisturbed one: weights, optimizer
state, random states, metrics. --count counts kills.

ranks: one rank is killed or stopped, or it crashes, exits or hangs, during its start, a step, a
save, generation or evaluation. The job must end within 30 s (after distributed_timeout, if only
that shows the fault), with an exit code other than 0. It must name this rank and blame no other,
and no process may remain.

launchers: torchrun is killed; its ranks must end within five seconds.

Each trial appends a JSON line to --output; the totals go to stdout. A trial's draws depend only on
the seed and its number: --first N continues from trial N. Exit code 1 if anything is wrong.
"""

import json
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).parents[1]))  # this checkout's
from tests.metrics import numbers
from tools.bench_run import parser_of
from tools.fault_jobs import KINDS, Job, activity

STEPS = 12
TIMEOUT_S = 15.0  # the jobs' engine.distributed_timeout
LIMIT_S = 30.0  # from the fault, or from the time-out, to the job's end
GONE_S = 5.0  # from the launcher's end to that of its ranks
WHOLE = ("dpo", "ppo", "time_shared", "distributed_optimizer")  # jobs that are killed whole
SINGLE = ("dpo", "time_shared", "ppo", "ppo_apart", "dpo_4", "ppo_4", "ppo_apart_4")
MOMENTS = {  # patterns of a rank's activity
    "start": "",
    "step": r"training step|action|phase (learn|score)",
    "save": r"saving",
    "evaluation": r"evaluation",
    "generation": r"phase generate|Batch|prefill|decode",
}
FAULTS = ("KILL", "STOP", "SEGV", "exit", "hang")
SILENT = ("STOP", "hang")  # noticed only by the time-out

# Script of a rank that exits or hangs as soon as a file asks for it.
TOLD = """
import os, runpy, signal, sys, threading, time

wanted = os.environ["FAULT"] + "." + os.environ["RANK"]


def hang(*_):
    marks = getattr(sys.modules.get("puzzle_align.runtime.liveness.activity"), "this_rank", None)
    # A rank that waits for others is not blamed, nor one in unhurried work: hang later.
    if marks is None or not (marks.is_waiting or marks.num_unhurried):
        signal.signal(signal.SIGUSR2, signal.SIG_IGN)
        while True:
            time.sleep(0.01)


def listen():
    while not os.path.exists(wanted):
        time.sleep(0.002)
    if open(wanted).read() == "exit":
        os._exit(3)
    while True:
        os.kill(os.getpid(), signal.SIGUSR2)
        time.sleep(0.002)


signal.signal(signal.SIGUSR2, hang)
threading.Thread(target=listen, daemon=True).start()
sys.argv[0] = {script!r}
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def main() -> int:
    """Run the trials that the arguments ask for."""
    parser = parser_of(__doc__)
    parser.add_argument("what", choices=("kills", "ranks", "launchers"), help="kind of trials")
    parser.add_argument("--count", type=int, default=10, help="trials, or kills (10)")
    parser.add_argument("--first", type=int, default=0, metavar="N", help="first trial (0)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the trials' draws (0)")
    parser.add_argument("--output", type=Path, required=True, help="file of JSON lines")
    args = parser.parse_args()
    totals: Counter[str] = Counter()
    number = args.first
    with tempfile.TemporaryDirectory() as folder:
        trials = Trials(Path(folder), args.seed)
        while totals["count"] < args.count:
            outcome = getattr(trials, args.what)(number)
            with args.output.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"trial": number, "seed": args.seed, **outcome}) + "\n")
            totals.update(trials=1, count=outcome.get("kills", 1), wrong=bool(outcome["wrong"]))
            number += 1
    print(json.dumps({"what": args.what, "seed": args.seed, **totals}))
    return 1 if totals["wrong"] else 0


class Trials:
    """The three kinds of trials; each call runs one and returns its outcome."""

    def __init__(self, folder: Path, seed: int) -> None:
        self._folder, self._seed = folder, seed
        self._undisturbed: dict[str, tuple[float, Job]] = {}

    def kills(self, number: int) -> dict[str, Any]:
        """Kill a whole job, one to three times, and resume it to the end."""
        rng, name = random.Random(f"{self._seed} {number}"), WHOLE[number % len(WHOLE)]
        seconds, undisturbed = self._run_undisturbed(name)
        job = Job(self._folder / f"killed{number}", KINDS[name], {"max_steps": STEPS})
        moments: list[dict[str, Any]] = []
        problems: list[str] = []
        try:
            for _ in range(rng.randint(1, 3)):
                running = job.start()
                if not _is_there_yet(job, running, rng, seconds):  # it was over sooner
                    problems += [] if running.returncode == 0 else [f"ended: {job.told()}"]
                    break
                half_done = job.half_done()
                job.kill()
                running.wait()
                num_half_done = len(job.half_done() | half_done)
                moments.append({"step": _steps_done(job), "half_done": num_half_done})
            job.finish()
            problems += _differences(job, undisturbed)
        except AssertionError as error:
            problems.append(str(error))
        finally:
            job.kill()
            shutil.rmtree(job.output_dir, ignore_errors=True)
        return {"job": name, "kills": len(moments), "moments": moments, "wrong": problems}

    def ranks(self, number: int) -> dict[str, Any]:
        """Disturb one rank."""
        rng, name = random.Random(f"{self._seed} {number}"), SINGLE[number % len(SINGLE)]
        missing = "evaluation" if name.startswith("ppo") else "generation"
        moment = rng.choice([m for m in MOMENTS if m != missing])
        fault = FAULTS[number // len(SINGLE) % len(FAULTS)]
        victim = rng.randrange(KINDS[name].ranks)
        job = endless(self._folder / f"fault{number}", name)
        try:
            outcome = disturb(job, fault, victim, moment, rng)
        except AssertionError as error:  # it ended or stalled before the fault
            outcome = {"wrong": [str(error)]}
        finally:
            job.kill()
        return {"job": name, "fault": fault, "moment": moment, "victim": victim, **outcome}

    def launchers(self, number: int) -> dict[str, Any]:
        """Kill torchrun alone."""
        rng, name = random.Random(f"{self._seed} {number}"), SINGLE[number % len(SINGLE)]
        seconds = rng.uniform(0.0, 4.0) if number % 2 else rng.uniform(0.0, 20.0)
        job = endless(self._folder / f"launcher{number}", name)
        try:
            running = job.start()
            time.sleep(seconds)
            seen = len(job.processes())
            running.kill()
            running.wait()
            left = left_after(job, GONE_S)
        finally:
            job.kill()
        return {"job": name, "after": round(seconds, 2), "processes": seen, "wrong": left}

    def _run_undisturbed(self, name: str) -> tuple[float, Job]:
        """Seconds of the undisturbed job, and the job; it is run once."""
        if name not in self._undisturbed:
            job = Job(self._folder / name, KINDS[name], {"max_steps": STEPS})
            started = time.monotonic()
            job.finish()
            self._undisturbed[name] = time.monotonic() - started, job
        return self._undisturbed[name]


def endless(output_dir: Path, name: str, timeout_s: float = TIMEOUT_S) -> Job:
    """A job that ends only by a fault, with saves and evaluations."""
    script = output_dir.with_suffix(".py")
    script.write_text(TOLD.replace("{script!r}", repr(str(Job.SCRIPT))))
    keys: dict[str, Any] = {
        "max_steps": 100_000,
        "engine.distributed_timeout": timeout_s,
        "checkpoint.save_every": 3,
    }
    if not name.startswith("ppo"):
        keys |= {"telemetry.eval_every": 2, "data.eval_fraction": 0.1}
    return Job(output_dir, KINDS[name], keys, script=script)


def disturb(
    job: Job,
    fault: str,
    victim: int,
    moment: str,
    rng: random.Random,
    timeout_s: float = TIMEOUT_S,
) -> dict[str, Any]:
    """Start the job, disturb a rank, and list what was wrong with the job's end.

    Args:
        timeout_s: the job's.
    """
    running = job.start()
    if moment == "start":
        job.wait_until(lambda: job.rank_process(victim), lambda: running.poll() is not None)
        process = job.rank_process(victim)
        assert process is not None
        time.sleep(rng.uniform(0.0, 8.0))
    else:
        job.wait_until(lambda: _steps_done(job) >= 1, lambda: running.poll() is not None)
        process = job.rank_process(victim)
        assert process is not None, job.told()
        time.sleep(rng.uniform(0.0, 1.0))
        wanted = re.compile(MOMENTS[moment])
        job.wait_until(
            lambda: wanted.search(activity(process.pid) or ""), lambda: running.poll() is not None
        )
    doing, began = activity(process.pid), time.monotonic()
    _do(job, process, fault, victim)
    if moment == "start" and fault in SILENT:  # a rank that has not joined waits for nobody
        job.wait_until(
            lambda: job.has_joined(besides=process.pid), lambda: running.poll() is not None
        )
        began = time.monotonic()
    limit = LIMIT_S + (timeout_s if fault in SILENT else 0.0)
    try:
        code = running.wait(timeout=limit)
    except subprocess.TimeoutExpired:
        code = None
    seconds = time.monotonic() - began
    problems = [] if code is not None else [f"not over within {limit:g} s"]
    problems += ["exit code 0"] if code == 0 else []
    problems += left_after(job, 1.0) if code is not None else []
    problems += _blame(job.log.read_text(errors="replace"), victim)
    outcome = {"doing": doing, "seconds": round(seconds, 1), "code": code, "wrong": problems}
    return {**outcome, "told": job.told()} if problems else outcome


def _do(job: Job, process: psutil.Process, fault: str, victim: int) -> None:
    if fault in ("exit", "hang"):
        file = job.output_dir.with_suffix(f".{victim}")  # which the script waits for
        unfinished = file.with_name(f"{file.name}.part")  # an empty file would mean a hang
        unfinished.write_text(fault)
        unfinished.rename(file)
    else:
        process.send_signal(getattr(signal, f"SIG{fault}"))


def _blame(told: str, victim: int) -> list[str]:
    """Mistakes in the job's messages about the failed rank."""
    blamed = re.findall(r"^rank (\d+) (?:\(.*\)|failed)", told, re.MULTILINE)
    root = re.search(r"Root Cause.*?rank +: (\d+) ", told, re.DOTALL)
    # Before the ranks have met, only the launcher knows which one died.
    blamed = blamed or ([root.group(1)] if root else [])
    return [] if set(blamed) == {str(victim)} else [f"rank {victim} failed, blamed: {blamed}"]


def left_after(job: Job, seconds: float) -> list[str]:
    """Lines on the job's processes that still live after ``seconds``."""
    deadline = time.monotonic() + seconds
    while (left := job.processes()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return [f"left: {process.pid} {process.cmdline()[:4]}" for process in left]


def _is_there_yet(
    job: Job, running: subprocess.Popen[bytes], rng: random.Random, seconds: float
) -> bool:
    """Wait for a random moment of a job that takes ``seconds``; False if it is over before."""
    after = rng.uniform(0.0, seconds)
    if rng.random() < 0.5:  # soon after a step
        step, after = rng.randint(1, STEPS), rng.uniform(0.0, 0.3)
        while _steps_done(job) < step and running.poll() is None:
            time.sleep(0.002)
    with suppress(subprocess.TimeoutExpired):
        running.wait(timeout=after)
    return running.returncode is None


def _steps_done(job: Job) -> int:
    return len(job.metrics.read_text().splitlines()) if job.metrics.exists() else 0


def _differences(job: Job, undisturbed: Job) -> list[str]:
    """Differences between the end of a resumed job and of the undisturbed one."""
    parts: dict[str, Callable[[Job], Any]] = {
        "metrics": lambda one: numbers(one.output_dir),
        "tensors": lambda one: one.tensors(STEPS),
    }
    assert undisturbed.tensors(STEPS), "no tensors to compare"
    return [f"other {name}" for name, of in parts.items() if of(job) != of(undisturbed)]


if __name__ == "__main__":
    sys.exit(main())
