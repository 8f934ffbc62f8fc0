"""A run killed ten times, saves included, ends with bitwise the numbers of an undisturbed one."""

import json
import os
import random
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.e2e.launch import ROOT, python_path

STEPS, SAVE_EVERY = 60, 2
KILLS = ("save", "step", "save", "save", "start", "save", "step", "save", "save", "step")
PATIENCE_S = 120.0
CONFIG = f"""
global_batch_size: 8
max_steps: {STEPS}
engine: {{device: cpu}}
actor:
  model:
    config:
      model_type: llama
      hidden_size: 64
      intermediate_size: 128
      num_hidden_layers: 2
      num_attention_heads: 4
      num_key_value_heads: 2
      vocab_size: 260
      max_position_embeddings: 128
tokenizer: {{path: byte}}
data: {{format: synthetic, num_synthetic: 256, max_length: 128}}
packing: {{row_tokens: 256}}
optimizer: {{lr: 1e-3, warmup_steps: 5, use_distributed_optimizer: true}}
checkpoint: {{save_every: {SAVE_EVERY}, keep_last: 2}}
telemetry: {{tensorboard: false, progress: false}}
"""
MARK = "PUZZLE_ALIGN_KILL_TEST"


class Job:
    """The same command, started again and again; all its processes carry a mark."""

    def __init__(self, output_dir: Path) -> None:
        self.output_dir = output_dir
        self.checkpoints = output_dir / "checkpoints"
        self.metrics = output_dir / "metrics.jsonl"
        self.log = output_dir.with_suffix(".log")
        self.mark = uuid.uuid4().hex

    def start(self) -> subprocess.Popen:
        config = self.output_dir.with_suffix(".yaml")
        config.write_text(f"output_dir: {self.output_dir}\n{CONFIG}")
        launcher = "-m torch.distributed.run --standalone --nproc-per-node 2"
        with self.log.open("a") as log:
            return subprocess.Popen(
                [sys.executable, *launcher.split(), "launch/train.py", "--config", str(config)],
                cwd=ROOT,
                env={
                    "OMP_NUM_THREADS": "1",
                    **os.environ,
                    "PYTHONPATH": python_path(),
                    "PYTHONWARNINGS": "ignore",
                    MARK: self.mark,
                },
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def processes(self) -> list[psutil.Process]:
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get(MARK) == self.mark:
                    found.append(process)
            except psutil.Error:
                continue
        return found

    def kill(self) -> None:
        """SIGKILL everything at once, as a node that fails does."""
        while processes := self.processes():
            for process in processes:
                try:
                    process.kill()
                except psutil.NoSuchProcess:
                    continue
            psutil.wait_procs(processes, timeout=5)

    def half_done(self) -> list[Path]:
        """Saves and deletions under way."""
        return [*self.checkpoints.glob(".saving_*"), *self.checkpoints.glob(".deleting_*")]

    def wait_until(self, happened: Callable[[], object], running: subprocess.Popen) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not happened():
            assert running.poll() is None, f"ended early:\n{self.log.read_text()[-3000:]}"
            assert time.monotonic() < deadline, f"stuck:\n{self.log.read_text()[-3000:]}"
            time.sleep(0.002)

    def run_and_kill(self, moment: str, rng: random.Random) -> bool:
        """Start, kill at a seeded moment; whether a save was under way."""
        known = set(self.half_done())
        seen = set(known)
        running = self.start()
        if moment == "start":
            time.sleep(rng.uniform(0, 10))
        elif moment == "save":
            for _ in range(rng.randint(1, 3)):
                self.wait_until(lambda: set(self.half_done()) - seen, running)
                seen.update(self.half_done())
            time.sleep(rng.uniform(0, 0.3))
        else:
            logged = self.metrics.stat().st_mtime_ns if self.metrics.exists() else 0
            self.wait_until(
                lambda: self.metrics.exists() and self.metrics.stat().st_mtime_ns != logged, running
            )
            time.sleep(rng.uniform(0, 0.5))
        assert running.poll() is None, "the job ended before it was killed: give it more steps"
        self.kill()
        running.wait()
        return bool(set(self.half_done()) - known)

    def finish(self) -> None:
        running = self.start()
        assert running.wait(timeout=3 * PATIENCE_S) == 0, self.log.read_text()[-3000:]

    def losses(self) -> list[tuple[int, float, float]]:
        records = [json.loads(line) for line in self.metrics.read_text().splitlines()]
        return [(record["step"], record["loss"], record["grad_norm"]) for record in records]

    def final_tensors(self) -> dict[str, bytes]:
        """The last checkpoint's files of tensors: weights, optimizer and random states."""
        last = self.checkpoints / f"step_{STEPS:08d}"
        return {path.name: path.read_bytes() for path in last.glob("*.distcp")}


@pytest.mark.timeout(900)
def test_ten_kills_change_no_bit(tmp_path: Path) -> None:
    undisturbed, killed = Job(tmp_path / "undisturbed"), Job(tmp_path / "killed")
    undisturbed.finish()
    rng = random.Random(7)
    try:
        in_saves = sum(killed.run_and_kill(moment, rng) for moment in KILLS)
        killed.finish()
        assert not killed.processes()
    finally:
        killed.kill()
    assert in_saves >= 4
    assert [step for step, *_ in killed.losses()] == list(range(1, STEPS + 1))
    assert killed.losses() == undisturbed.losses()
    assert len(undisturbed.final_tensors()) == 2
    assert killed.final_tensors() == undisturbed.final_tensors()
    names = sorted(path.name for path in killed.checkpoints.iterdir())
    assert names == [".lock", f"step_{STEPS - SAVE_EVERY:08d}", f"step_{STEPS:08d}"]
    print(f"{in_saves} of {len(KILLS)} kills hit a save")
