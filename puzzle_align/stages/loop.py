"""The training loop of every stage: resume, step, evaluate, save, report."""

import json
import logging
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

import torch

from puzzle_align.runtime.checkpoint import (
    Saved,
    claimed,
    load_checkpoint,
    save_checkpoint,
)
from puzzle_align.runtime.context import Context
from puzzle_align.runtime.groups import World
from puzzle_align.runtime.optimizer import Optimizer
from puzzle_align.runtime.reduce import from_rank_zero, sum_over_world
from puzzle_align.runtime.telemetry import Telemetry, Work, open_telemetry
from puzzle_align.spec.job import JobConfig
from puzzle_align.spec.model import to_hf_config
from puzzle_align.spec.roles import role_model, role_names, trained_role
from puzzle_align.stages.inputs import checkpoint_folder, to_resume
from puzzle_align.stages.interruption import Interruption, listening
from puzzle_align.stages.setup import RoleSetup

# What a resumed run must share with the checkpoint: its steps would hold other data or another
# loss, or (the optimizer's) other values than the config says would be loaded without a word.
_BINDING = (
    "stage",
    "seed",
    "global_batch_size",
    "data.shuffle",
    "packing.scope",
    "optimizer.use_distributed_optimizer",
    "optimizer.adam_beta1",
    "optimizer.adam_beta2",
    "optimizer.adam_eps",
)
_BINDING_IN_STAGE = {
    "dpo": ("actor.model", "reference.model", "dpo"),
    "reward": ("reward.model", "reward_loss"),
}

_logger = logging.getLogger(__name__)


class Trainer(Protocol):
    """What a stage gives the loop, on every rank; rank 0 is one of the policy's."""

    trained: RoleSetup
    num_steps: int
    num_skipped: int
    data_fingerprint: str

    @property
    def policy(self) -> Context | None:
        """The model that is trained; None on ranks that only run other models."""
        ...

    @property
    def optimizer(self) -> Optimizer | None:
        """None where there is no policy."""
        ...

    def train_step(self, step: int) -> tuple[dict[str, float], Work]:
        """Optimizer step ``step``, counted from 0."""
        ...

    def evaluate(self) -> dict[str, float] | None:
        """Metrics of the held-out data; None without any, or without a policy."""
        ...


def train(config: JobConfig, trainer: Trainer, world: World) -> None:
    """Run ``trainer`` to its last step, or until a signal asks to stop. Collective.

    Raises:
        ValueError: if the checkpoint folder cannot be written, or holds a checkpoint that this job
            cannot go on from.
    """
    folder = checkpoint_folder(config)
    with claimed(folder), listening() as interruption:
        start = _resume(config, trainer, folder)
        telemetry = open_telemetry(
            config.telemetry,
            output_dir=Path(config.output_dir),
            rank=world.rank,
            world_size=world.size,
            device=world.device,
            num_steps=trainer.num_steps,
            resumed_step=start or None,
            settings=asdict(config),
        )
        if start == 0:
            _evaluate(trainer, telemetry, 0)
        for step in range(start, trainer.num_steps):
            metrics, work = trainer.train_step(step)
            done = step + 1
            telemetry.log(done, metrics, work)
            last = done == trainer.num_steps
            if last or _due(done, config.telemetry.eval_every):
                _evaluate(trainer, telemetry, done)
            stop = _asked_anywhere(interruption, world)
            if stop or last or _due(done, config.checkpoint.save_every):
                _save(config, trainer, folder, done)
            if stop and not last:
                _logger.warning("asked to stop: saved step %d; run again to go on from it", done)
                break
        telemetry.close({"skipped_steps": trainer.num_skipped})


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def _evaluate(trainer: Trainer, telemetry: Telemetry, step: int) -> None:
    metrics = trainer.evaluate()
    if metrics is not None:
        telemetry.eval(step, metrics)


def _asked_anywhere(interruption: Interruption, world: World) -> bool:
    """Whether any rank was asked to stop: the same answer on all of them."""
    asked = torch.tensor(float(interruption.asked), device=world.device)
    return sum_over_world(asked).item() > 0


def _save(config: JobConfig, trainer: Trainer, folder: Path, step: int) -> None:
    job = {
        "config": asdict(config),
        "data": trainer.data_fingerprint,
        "skipped_steps": trainer.num_skipped,
    }
    keep_last = config.checkpoint.keep_last
    save_checkpoint(folder, step, job, trainer.policy, trainer.optimizer, keep_last=keep_last)


def _resume(config: JobConfig, trainer: Trainer, folder: Path) -> int:
    """Load what there is to go on from; returns the number of steps that are done."""
    saved = from_rank_zero(lambda: to_resume(config))
    if saved is None:
        return 0
    _check_same_model(config, trainer, saved)
    if not saved.job["has_optimizer"]:
        others = role_names(config)[1:]
        kept = "".join(f"; the {role} keeps those of its own config" for role in others)
        _logger.warning("starting from the weights in %s%s", saved.path, kept)
        load_checkpoint(saved, trainer.policy, trainer.optimizer)
        return 0
    _check_same_job(config, trainer, saved)
    load_checkpoint(saved, trainer.policy, trainer.optimizer)
    trainer.num_skipped = saved.job["skipped_steps"]
    return saved.step


_CURE = "restore it, or start anew with another output_dir"


def _check_same_model(config: JobConfig, trainer: Trainer, saved: Saved) -> None:
    if saved.job["model"] != to_hf_config(trainer.trained.spec):
        _, key = role_model(config, trained_role(config))
        raise ValueError(f"{saved.path} is of another model than {key}: {_CURE}")


def _check_same_job(config: JobConfig, trainer: Trainer, saved: Saved) -> None:
    """Raise a one-line ValueError if resuming would not continue the same run."""
    own, old_dtype = trainer.trained.options.dtype, saved.job["dtype"]
    if old_dtype != own:
        raise ValueError(f"engine.dtype is {own}, but {old_dtype} in {saved.path}: {_CURE}")
    old, new = saved.job["config"], json.loads(json.dumps(asdict(config)))
    # Ready rows are drawn by the row: there the packing says which pairs a step holds.
    packing = ("packing",) if config.packing.scope == "dataset" else ()
    for name in (*_BINDING, *_BINDING_IN_STAGE[config.stage], *packing):
        for key, was, value in _differences(name, _value(old, name), _value(new, name)):
            raise ValueError(f"{key} is {value}, but {was} in {saved.path}: {_CURE}")
    if saved.job["data"] != trainer.data_fingerprint:
        raise ValueError(f"{saved.path} was trained on other data (data.*, tokenizer.*): {_CURE}")
    if saved.step > trainer.num_steps:
        raise ValueError(
            f"{saved.path} is at step {saved.step}, past the job's {trainer.num_steps} steps:"
            " raise max_steps or num_train_epochs"
        )


def _differences(name: str, old: Any, new: Any) -> Iterator[tuple[str, Any, Any]]:
    """``(dotted key, old value, new value)`` of every value that differs."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in {**old, **new}:
            yield from _differences(f"{name}.{key}", old.get(key), new.get(key))
    elif old != new:
        yield name, old, new


def _value(tree: dict[str, Any], name: str) -> Any:
    for part in name.split("."):
        tree = tree[part]
    return tree
