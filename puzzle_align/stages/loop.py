"""The training loop of every stage: resume, step, evaluate, save, report."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Protocol

from puzzle_align.runtime.checkpoint import (
    Saved,
    find_latest,
    load_checkpoint,
    save_checkpoint,
)
from puzzle_align.runtime.context import Context
from puzzle_align.runtime.groups import World
from puzzle_align.runtime.optimizer import Optimizer
from puzzle_align.runtime.telemetry import Telemetry, Work, open_telemetry
from puzzle_align.spec.job import CheckpointConfig, JobConfig
from puzzle_align.spec.model import to_hf_config

# What a resumed run must share with the checkpoint, or its steps would hold other data.
_BINDING = ("stage", "seed", "global_batch_size", "packing", "dpo")


class Trainer(Protocol):
    """What a stage gives the loop."""

    policy: Context
    optimizer: Optimizer
    num_steps: int
    num_skipped: int
    data_fingerprint: str

    def train_step(self, step: int) -> tuple[dict[str, float], Work]:
        """Optimizer step ``step``, counted from 0."""
        ...

    def evaluate(self) -> dict[str, float] | None:
        """Metrics of the held-out data; None without any."""
        ...


def train(config: JobConfig, trainer: Trainer, world: World) -> None:
    """Run ``trainer`` to its last step. Collective.

    Raises:
        ValueError: if a checkpoint is there that this job cannot go on from.
    """
    folder = Path(config.checkpoint.dir or Path(config.output_dir) / "checkpoints")
    saved = _to_resume(config.checkpoint, folder)
    if saved is not None:
        _check_same_job(config, trainer, saved)
        load_checkpoint(saved, trainer.policy, trainer.optimizer)
        trainer.num_skipped = saved.job["skipped_steps"]
    telemetry = open_telemetry(
        config.telemetry,
        output_dir=Path(config.output_dir),
        rank=world.rank,
        world_size=world.size,
        device=world.device,
        num_steps=trainer.num_steps,
        resumed_step=None if saved is None else saved.step,
        settings=asdict(config),
    )
    start = 0 if saved is None else saved.step
    if start == 0:
        _evaluate(trainer, telemetry, 0)
    for step in range(start, trainer.num_steps):
        metrics, work = trainer.train_step(step)
        done = step + 1
        telemetry.log(done, metrics, work)
        last = done == trainer.num_steps
        if last or _due(done, config.telemetry.eval_every):
            _evaluate(trainer, telemetry, done)
        if last or _due(done, config.checkpoint.save_every):
            _save(config, trainer, folder, done, world)
    telemetry.close({"skipped_steps": trainer.num_skipped})


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def _evaluate(trainer: Trainer, telemetry: Telemetry, step: int) -> None:
    metrics = trainer.evaluate()
    if metrics is not None:
        telemetry.eval(step, metrics)


def _save(config: JobConfig, trainer: Trainer, folder: Path, step: int, world: World) -> None:
    job = {
        "config": asdict(config),
        "model": to_hf_config(trainer.policy.spec),
        "data": trainer.data_fingerprint,
        "skipped_steps": trainer.num_skipped,
        "world_size": world.size,
    }
    keep_last = config.checkpoint.keep_last
    save_checkpoint(folder, step, job, trainer.policy, trainer.optimizer, keep_last=keep_last)


def _to_resume(config: CheckpointConfig, folder: Path) -> Saved | None:
    saved = find_latest(folder) if config.resume != "never" else None
    if saved is None and config.resume == "must":
        raise ValueError(f"checkpoint.resume=must: no checkpoint in {folder}; set it to auto")
    return saved


def _check_same_job(config: JobConfig, trainer: Trainer, saved: Saved) -> None:
    """Raise a one-line ValueError if resuming would not continue the same run."""
    cure = "restore it, or start anew with checkpoint.resume=never and another output_dir"
    if not saved.job["has_optimizer"]:
        raise ValueError(f"{saved.path} holds weights only, no optimizer: give it as actor.model.path")
    if saved.job["model"] != to_hf_config(trainer.policy.spec):
        raise ValueError(f"{saved.path} is of another model than actor.model: {cure}")
    if saved.job["data"] != trainer.data_fingerprint:
        raise ValueError(f"{saved.path} was trained on other data (data.*, tokenizer.*): {cure}")
    old, new = saved.job["config"], json.loads(json.dumps(asdict(config)))
    for key in _BINDING:
        if old[key] != new[key]:
            raise ValueError(f"{key} is {new[key]}, but {old[key]} in {saved.path}: {cure}")
    if saved.step > trainer.num_steps:
        raise ValueError(
            f"{saved.path} is at step {saved.step}, past the job's {trainer.num_steps} steps:"
            " raise max_steps or num_train_epochs"
        )
