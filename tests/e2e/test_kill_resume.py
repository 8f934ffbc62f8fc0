"""A run killed ten times, saves included, ends with bitwise the numbers of an undisturbed one.

``tools/fault_trials.py`` does so at random, with launchers, to jobs of more kinds.
"""

import random
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.launch import running_job
from tests.fork_server import Process
from tools.fault_jobs import KINDS, PATIENCE_S, Job

STEPS, SAVE_EVERY = 60, 2
KILLS = ("save", "step", "save", "save", "start", "save", "step", "save", "save", "step")


class ForkedJob(Job):
    """Its ranks need no launcher, and no imports of their own."""

    def __init__(self, output_dir: Path) -> None:
        keys = {"max_steps": STEPS, "checkpoint.save_every": SAVE_EVERY}
        super().__init__(output_dir, KINDS["distributed_optimizer"], keys)

    def run_until(self, happened: Callable[[], object], then_s: float = 0.0) -> None:
        """Run, and kill all ranks so long after something has happened."""
        with running_job("--config", str(self.config), log=self.log) as ranks:
            self.wait_until(happened, lambda: _over(ranks))
            time.sleep(then_s)
            assert not _over(ranks), "the job ended before it was killed: give it more steps"

    def run_to_the_end(self) -> None:
        with running_job("--config", str(self.config), log=self.log) as ranks:
            deadline = time.monotonic() + 3 * PATIENCE_S
            while not all(codes := [rank.poll() is not None for rank in ranks]):
                assert time.monotonic() < deadline, (codes, self.told())
                time.sleep(0.02)
            assert [rank.poll() for rank in ranks] == [0, 0], self.told()

    def run_and_kill(self, moment: str, rng: random.Random) -> bool:
        """Kill it at a seeded moment; whether a save was under way."""
        known = self.half_done()
        if moment == "start":
            self.run_until(lambda: True, rng.uniform(0, 3))
        elif moment == "save":
            seen, saves = set(known), rng.randint(1, 3)

            def so_many_began() -> bool:
                seen.update(self.half_done())
                return len(seen - known) >= saves

            self.run_until(so_many_began, rng.uniform(0, 0.05))
        else:
            logged = self._last_logged()
            self.run_until(lambda: self._last_logged() != logged, rng.uniform(0, 0.5))
        return bool(self.half_done() - known)

    def _last_logged(self) -> int:
        return self.metrics.stat().st_mtime_ns if self.metrics.exists() else 0


def _over(ranks: list[Process]) -> bool:
    return any(rank.poll() is not None for rank in ranks)


@pytest.mark.timeout(900)
def test_ten_kills_change_no_bit(tmp_path: Path) -> None:
    undisturbed, killed = ForkedJob(tmp_path / "undisturbed"), ForkedJob(tmp_path / "killed")
    undisturbed.run_to_the_end()
    rng = random.Random(7)
    in_saves = sum(killed.run_and_kill(moment, rng) for moment in KILLS)
    killed.run_to_the_end()
    assert in_saves >= 4
    assert [record["step"] for record in killed.numbers()] == list(range(1, STEPS + 1))
    assert killed.numbers() == undisturbed.numbers()
    assert len(undisturbed.tensors(STEPS)) == 2
    assert killed.tensors(STEPS) == undisturbed.tensors(STEPS)
    names = sorted(path.name for path in killed.checkpoints.iterdir())
    assert names == [".lock", f"step_{STEPS - SAVE_EVERY:08d}", f"step_{STEPS:08d}"]
    print(f"{in_saves} of {len(KILLS)} kills hit a save")
