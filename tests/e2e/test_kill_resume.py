"""A run killed several times, saves included, ends with bitwise the numbers of an undisturbed one.

``tools/fault_trials.py`` does so at random, with launchers, to jobs of more kinds.
"""

import random
import signal
import time
from pathlib import Path

import psutil
import pytest

from tests.e2e.launch import running_job
from tests.fork_server import Process
from tests.metrics import numbers
from tools.fault_jobs import KINDS, PATIENCE_S, Job

STEPS, SAVE_EVERY = 40, 2
KILLS = ("save", "step", "save", "start", "save", "step")


class ForkedJob(Job):
    """Its ranks need no launcher, and no imports of their own."""

    def __init__(self, output_dir: Path, kind: str) -> None:
        keys = {"max_steps": STEPS, "checkpoint.save_every": SAVE_EVERY}
        super().__init__(output_dir, KINDS[kind], keys)

    def run_to_the_end(self) -> None:
        with running_job("--config", str(self.config), log=self.log) as ranks:
            deadline = time.monotonic() + 3 * PATIENCE_S
            while not all(codes := [rank.poll() is not None for rank in ranks]):
                assert time.monotonic() < deadline, (codes, self.told())
                time.sleep(0.02)
            assert [rank.poll() for rank in ranks] == [0, 0], self.told()

    def run_and_kill(self, moment: str, rng: random.Random) -> bool:
        """Kill all ranks at a seeded moment; whether a save was under way."""
        known, logged = self.half_done(), self._last_logged()
        with running_job("--config", str(self.config), log=self.log) as ranks:
            if moment == "save":
                self._stop_in_a_save(ranks, rng)
            elif moment == "step":
                self.wait_until(lambda: self._last_logged() != logged, lambda: _over(ranks))
                time.sleep(rng.uniform(0, 0.1))
            else:  # a fast machine takes 0.2 s to the first step, and then 0.05 s for each
                time.sleep(rng.uniform(0, 0.4))
            assert not _over(ranks), "the job ended before it was killed: give it more steps"
        return bool(self.half_done() - known)

    def _stop_in_a_save(self, ranks: list[Process], rng: random.Random) -> None:
        """Stop all ranks while they save or delete for the first to the third time.

        How long a save takes is the disk's affair: where it was over before all had stopped, they
        go on, and are stopped sooner in the next one.
        """
        began = self._wait_for_a_save(ranks)
        for _ in range(rng.randint(0, 2)):
            began = self._wait_for_a_save(ranks)
        then_s = rng.uniform(0, 0.05)
        while True:
            time.sleep(then_s)
            _send(signal.SIGSTOP, ranks)
            self.wait_until(lambda: all(map(_is_stopped, ranks)), lambda: _over(ranks))
            if self.half_done() & began:
                return
            _send(signal.SIGCONT, ranks)
            then_s /= 2
            began = self._wait_for_a_save(ranks)

    def _wait_for_a_save(self, ranks: list[Process]) -> set[Path]:
        """Wait until one begins, or a deletion; its folders."""
        known, began = self.half_done(), set[Path]()

        def has_begun() -> bool:
            began.update(self.half_done() - known)
            return bool(began)

        self.wait_until(has_begun, lambda: _over(ranks))
        return began

    def _last_logged(self) -> int:
        return self.metrics.stat().st_mtime_ns if self.metrics.exists() else 0


def _over(ranks: list[Process]) -> bool:
    return any(rank.poll() is not None for rank in ranks)


def _send(number: int, ranks: list[Process]) -> None:
    for rank in ranks:
        rank.send_signal(number)


def _is_stopped(rank: Process) -> bool:
    try:
        return psutil.Process(rank.pid).status() == psutil.STATUS_STOPPED
    except psutil.NoSuchProcess:  # it ended first
        return False


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("kind", "kills"),
    [
        ("distributed_optimizer", ("save", "start")),
        pytest.param("distributed_optimizer", KILLS, marks=pytest.mark.slow),
        pytest.param("adapters", KILLS, marks=pytest.mark.slow),
    ],
)
def test_kills_change_no_bit(kind: str, kills: tuple[str, ...], tmp_path: Path) -> None:
    undisturbed, killed = (ForkedJob(tmp_path / n, kind) for n in ("undisturbed", "killed"))
    undisturbed.run_to_the_end()
    rng = random.Random(7)
    in_saves = sum(killed.run_and_kill(moment, rng) for moment in kills)
    killed.run_to_the_end()
    assert in_saves >= kills.count("save")
    records = numbers(killed.output_dir)
    assert [record["step"] for record in records] == list(range(1, STEPS + 1))
    assert records == numbers(undisturbed.output_dir)
    assert len(undisturbed.tensors(STEPS)) == 2
    assert killed.tensors(STEPS) == undisturbed.tensors(STEPS)
    names = sorted(path.name for path in killed.checkpoints.iterdir())
    assert names == [".lock", f"step_{STEPS - SAVE_EVERY:08d}", f"step_{STEPS:08d}"]
    print(f"{in_saves} of {len(kills)} kills hit a save")
