"""Tiny jobs under torchrun on this machine, to be disturbed and compared.

Every process of a job has a mark in its environment, by which remaining processes are found. A
rank's activity is read from the memory that it shares with its neighbours
(``puzzle_align.runtime.liveness.activity``).
"""

import json
import os
import stat
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from puzzle_align.config.yaml_tree import Tree

ROOT = Path(__file__).parents[1]
MARK = "PUZZLE_ALIGN_FAULT_JOB"
PATIENCE_S = 240.0
_MODEL = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 260,
    "max_position_embeddings": 128,
}
_DPO: dict[str, Any] = {
    "global_batch_size": 8,
    "engine.device": "cpu",
    "actor.model.config": _MODEL,
    "tokenizer.path": "byte",
    "data.format": "synthetic",
    "data.num_synthetic": 256,
    "data.max_length": 128,
    "packing.row_tokens": 256,
    "optimizer.lr": 1e-3,
    "optimizer.warmup_steps": 5,
    "optimizer.use_distributed_optimizer": False,
    "checkpoint.save_every": 2,
    "checkpoint.keep_last": 2,
    "telemetry.tensorboard": False,
    "telemetry.progress": False,
}
_PPO: dict[str, Any] = {
    **_DPO,
    "stage": "ppo",
    "reward.function": "puzzle_align.data.synthetic:vowel_share",
    "data.max_length": 32,
    "generation.max_new_tokens": 8,
    "ppo.kl_coef": 0.01,
}


@dataclass(frozen=True)
class Kind:
    """A job's keys, without its folder and length, and its number of ranks."""

    keys: Mapping[str, Any]
    ranks: int = 2


KINDS = {
    "dpo": Kind(_DPO),
    "distributed_optimizer": Kind({**_DPO, "optimizer.use_distributed_optimizer": True}),
    "time_shared": Kind(
        {
            **_DPO,
            "actor.parallel.pipeline_model_parallel_size": 2,
            "placement.reference": "time_shared",
        }
    ),
    "ppo": Kind(_PPO),
    "ppo_apart": Kind({**_PPO, "actor.ranks": "0", "critic.ranks": "1"}),
    "adapters": Kind(
        {
            **_PPO,
            "actor.parallel.pipeline_model_parallel_size": 2,
            "actor.lora.r": 4,
            "critic.lora.r": 4,
        }
    ),
    "dpo_4": Kind({**_DPO, "actor.parallel.pipeline_model_parallel_size": 2}, ranks=4),
    "ppo_4": Kind({**_PPO, "actor.parallel.pipeline_model_parallel_size": 2}, ranks=4),
    "ppo_apart_4": Kind({**_PPO, "actor.ranks": "0-1", "critic.ranks": "2-3"}, ranks=4),
}


class Job:
    """A command that may be started several times."""

    SCRIPT = ROOT / "launch" / "train.py"

    def __init__(
        self, output_dir: Path, kind: Kind, keys: Mapping[str, Any], script: Path = SCRIPT
    ) -> None:
        """Write the job's config; start nothing.

        Args:
            keys: in addition to the kind's.
        """
        self.output_dir = output_dir
        self.checkpoints = output_dir / "checkpoints"
        self.metrics = output_dir / "metrics.jsonl"
        self.log = output_dir.with_suffix(".log")
        self.mark = uuid.uuid4().hex
        self.ranks, self.script = kind.ranks, script
        self.config = output_dir.with_suffix(".yaml")
        output_dir.parent.mkdir(parents=True, exist_ok=True)
        tree = Tree()
        for name, value in {**kind.keys, **keys, "output_dir": str(output_dir)}.items():
            tree.override(f"{name}={json.dumps(value)}")
        self.config.write_text(json.dumps(tree.data), encoding="utf-8")

    def start(self) -> subprocess.Popen[bytes]:
        """Start the launcher."""
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += ["--local-addr", "127.0.0.1", "--nproc-per-node", str(self.ranks)]
        path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        variables = {"PYTHONPATH": path, "PYTHONWARNINGS": "ignore", "GLOO_SOCKET_IFNAME": "lo"}
        variables |= {MARK: self.mark, "FAULT": str(self.output_dir)}
        with self.log.open("a") as log:
            return subprocess.Popen(
                [*command, str(self.script), "--config", str(self.config)],
                cwd=ROOT,
                env={"OMP_NUM_THREADS": "1", **os.environ, **variables},
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def processes(self) -> list[psutil.Process]:
        """All living processes of the job."""
        return [process for process, _ in self._living()]

    def rank_process(self, rank: int) -> psutil.Process | None:
        """The process of ``rank``, if it lives."""
        matches = [p for p, values in self._living() if values.get("RANK") == str(rank)]
        # The rank is the oldest: it has started the others.
        return min(matches, key=psutil.Process.create_time, default=None)

    def has_joined(self, besides: int) -> bool:
        """Whether a rank other than the process ``besides`` has joined the job."""
        others = (process.pid for process in self.processes() if process.pid != besides)
        return any(activity(process) is not None for process in others)

    def _living(self) -> list[tuple[psutil.Process, dict[str, str]]]:
        """Living processes with the job's mark, and their environments."""
        living = []
        for process in psutil.process_iter():
            try:
                values = process.environ()
                if values.get(MARK) == self.mark and process.status() != psutil.STATUS_ZOMBIE:
                    living.append((process, values))
            except psutil.Error:
                continue
        return living

    def kill(self) -> None:
        """Send SIGKILL to all processes at once, like a failing node."""
        while processes := self.processes():
            for process in processes:
                try:
                    process.kill()
                except psutil.NoSuchProcess:
                    continue
            psutil.wait_procs(processes, timeout=5)

    def finish(self) -> None:
        """Run to the end."""
        running = self.start()
        try:
            assert running.wait(timeout=3 * PATIENCE_S) == 0, self.told()
        finally:
            self.kill()

    def wait_until(self, happened: Callable[[], object], is_over: Callable[[], object]) -> None:
        """Wait until ``happened``; AssertionError if the job is over before."""
        deadline = time.monotonic() + PATIENCE_S
        while not happened():
            assert not is_over(), f"ended early:\n{self.told()}"
            assert time.monotonic() < deadline, f"stuck:\n{self.told()}"
            time.sleep(0.002)

    def half_done(self) -> set[Path]:
        """Folders of unfinished saves and deletions."""
        return {*self.checkpoints.glob(".saving_*"), *self.checkpoints.glob(".deleting_*")}

    def told(self) -> str:
        """The end of its log."""
        return self.log.read_text(errors="replace")[-6000:]

    def tensors(self, step: int) -> dict[str, bytes]:
        """A checkpoint's files of tensors: weights, optimizer and random states."""
        saved = self.checkpoints / f"step_{step:08d}"
        return {path.name: path.read_bytes() for path in sorted(saved.glob("*.distcp"))}


def activity(process: int) -> str | None:
    """Activity that a rank shares with its neighbours; None if it has not joined the job."""
    try:
        for descriptor in Path(f"/proc/{process}/fd").iterdir():
            # A rank opens its own file for writing, its neighbours' only for reading.
            is_own = descriptor.lstat().st_mode & stat.S_IWUSR
            if is_own and os.readlink(descriptor).startswith("/memfd:activity"):
                return descriptor.read_bytes().rstrip(b"\0").decode(errors="replace")
    except OSError:  # it closed a file meanwhile, or is gone
        return None
    return None
