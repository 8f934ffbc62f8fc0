"""The training loop of every stage: resume, step, evaluate, save, report."""

import json
import logging
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

import torch

from puzzle_align.config.job import JobConfig
from puzzle_align.config.resolve import role_model, role_names, trained_roles
from puzzle_align.config.saved import DamagedError, Saved, damaged
from puzzle_align.config.schema import binding_keys
from puzzle_align.layout.hf_config import to_hf_config
from puzzle_align.layout.job_plan import JobPlan
from puzzle_align.layout.model import AttentionBackend
from puzzle_align.layout.shown import shown
from puzzle_align.runtime.checkpoint import (
    Trained,
    load_checkpoint,
    new_job_id,
    save_checkpoint,
)
from puzzle_align.runtime.checkpoint_folder import locked, set_aside, set_aside_newer
from puzzle_align.runtime.failure import CannotGoOn
from puzzle_align.runtime.groups import World
from puzzle_align.runtime.progress import phase, unhurried
from puzzle_align.runtime.reduce import from_rank_zero, sum_over_world
from puzzle_align.stages.divergence import Divergence, Update, spoilt_weights
from puzzle_align.stages.inputs import checkpoint_folder, not_resumed, to_resume
from puzzle_align.stages.interruption import listening
from puzzle_align.stages.plan_report import PlanReport
from puzzle_align.stages.starts import Starts, check_starts, find_starts
from puzzle_align.telemetry import Sample, StepStats, Telemetry, WaitCounter, open_telemetry

_logger = logging.getLogger(__name__)


class Trainer(Protocol):
    """What a stage gives the loop, on every rank."""

    plan: JobPlan
    num_steps: int
    num_skipped: int  # rank 0's is kept
    updates: Sequence[Update] = ()  # of the last step, in order; empty on ranks that know of none
    data_fingerprint: str
    models: Mapping[str, Trained]  # by role, those of which this rank has a part; maybe none
    # Whether the phases that a step reports end when all ranks and their devices are done: their
    # seconds are then the slowest one's, and no phase's work is counted to the next. (A step that
    # reports none ends so anyway: with metrics that all who train put together.)
    waits_between_phases: bool = False

    def state_dict(self) -> dict[str, Any]:
        """Small JSON values to save beside the models and counters; rank 0's are kept."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over, on every rank, what ``state_dict`` gave when the checkpoint was saved."""

    def train_step(self, step: int) -> tuple[dict[str, float], StepStats]:
        """Step ``step``, counted from 0: the metrics, on rank 0, and the work done."""
        ...

    def samples(self) -> Sequence[Sample]:
        """Some of the last step's responses, on rank 0; none of a stage that samples none."""
        return ()

    def evaluate(self) -> dict[str, float] | None:
        """Metrics of the held-out data; None without any, and on ranks that know none."""
        return None


def train(
    config: JobConfig, trainer: Trainer, world: World, report: PlanReport | None = None
) -> None:
    """Run ``trainer`` to its last step, or until a signal asks to stop. Collective.

    Args:
        report: what holds the steps' times against those that a plan file predicts.

    Raises:
        ValueError: if the checkpoint folder cannot be written, or holds a checkpoint that this job
            cannot go on from.
        CannotGoOn: where training diverges (``stages.divergence``); no step is saved in which it
            does.
    """
    folder = checkpoint_folder(config)
    trainer.waits_between_phases = report is not None
    with locked(folder), listening() as interruption:
        starts = from_rank_zero(lambda: find_starts(config, trainer.plan))
        start, job_id = _resume(config, trainer, folder, starts)
        origin = {"job_id": job_id, "starts": {role: asdict(own) for role, own in starts.items()}}
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
        counter = WaitCounter(world.device) if config.telemetry.host_waits else None
        divergence, saved, owed = Divergence(config, world.rank == 0), start, False
        if start == 0:
            _evaluate(trainer, telemetry, 0)
        for step in range(start, trainer.num_steps):
            counting = nullcontext({}) if counter is None else counter.counting()
            with phase(f"training step {step + 1}"), counting as counted:
                metrics, stats = trainer.train_step(step)
            done = step + 1
            divergence.note(done, trainer.updates)
            telemetry.log(done, metrics | counted, stats)
            if report is not None:
                report.note(stats)
            last = done == trainer.num_steps
            if _samples_due(done, last, config.telemetry.sample_every):
                _show_samples(trainer, telemetry, done)
            if last or _due(done, config.telemetry.eval_every):
                divergence.note_evaluation(done, _evaluate(trainer, telemetry, done))
            stop, failing, over = _anywhere(
                world, interruption.asked, divergence.is_failing, divergence.is_over
            )
            if over or (failing and (stop or last)):
                raise CannotGoOn(f"{divergence.explain()}; {_saved(folder, saved)}")
            owed = owed or stop or last or _due(done, config.checkpoint.save_every)
            if owed and not failing:
                if spoilt := spoilt_weights(trainer.models, trained_roles(config), world):
                    what = f"step {done} left weights of the {' and '.join(spoilt)} not finite"
                    raise CannotGoOn(f"{what}: lower optimizer.lr; {_saved(folder, saved)}")
                _save(config, trainer, folder, done, world.device, origin)
                saved, owed = done, False
            if stop and not last:
                _logger.warning("asked to stop: saved step %d; run again to go on from it", done)
                break
        with unhurried():  # what goes over the network takes its time
            telemetry.close({"skipped_steps": trainer.num_skipped})
        if report is not None:
            report.close()


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def _samples_due(step: int, last: bool, every: int) -> bool:
    """Whether samples are shown: at the first and the last step as well, unless never."""
    return every > 0 and (step == 1 or last or step % every == 0)


def _evaluate(trainer: Trainer, telemetry: Telemetry, step: int) -> dict[str, float]:
    """The evaluation's metrics, none where there are none, after they are reported."""
    with phase(f"evaluation after step {step}"):
        metrics = trainer.evaluate()
    if metrics is not None:
        telemetry.eval(step, metrics)
    return metrics or {}


def _show_samples(trainer: Trainer, telemetry: Telemetry, step: int) -> None:
    samples = trainer.samples()
    if samples:
        telemetry.log_samples(step, samples)


def _anywhere(world: World, *flags: bool) -> list[bool]:
    """Which flags any rank has raised: the same answer on all of them."""
    raised = torch.zeros(len(flags), device=world.device)
    for number, flag in enumerate(flags):
        raised[number].fill_(float(flag))  # there: nothing is copied, and nobody waits for it
    return [count > 0 for count in sum_over_world(raised).tolist()]


def _saved(folder: Path, step: int) -> str:
    """What a job that ends goes on from, when it is run again."""
    return f"the last checkpoint is {folder}/step_{step:08d}" if step else "no step was saved"


def attention_of(saved: Saved) -> AttentionBackend | None:
    """What a run computed attention with on CUDA; None where a checkpoint does not say so.

    One of weights alone (no optimizer) binds to nothing.
    """
    return saved.job.get("attention") if saved.has_optimizers else None


def _save(
    config: JobConfig,
    trainer: Trainer,
    folder: Path,
    step: int,
    device: torch.device,
    origin: dict[str, Any],
) -> None:
    job = {
        **origin,
        "config": asdict(config),
        "data": trainer.data_fingerprint,
        "skipped_steps": trainer.num_skipped,
        # That of all models. On a CPU it is no matter of timings, and says nothing of CUDA's.
        "attention": trainer.plan.contexts[0].options.attention if device.type == "cuda" else None,
        "state": trainer.state_dict(),
    }
    with phase(f"saving step {step}"):
        from_rank_zero(lambda: _check_there(folder))
        save_checkpoint(folder, step, job, trainer.models, keep_last=config.checkpoint.keep_last)


def _check_there(folder: Path) -> None:
    """Raise CannotGoOn where the folder of a run was deleted: it is not made anew in silence."""
    if not folder.is_dir():
        raise CannotGoOn(
            f"{folder} could not be written (No such file or directory): it was deleted while the"
            " job ran; run the same command again, and leave output_dir in place"
        )


def _resume(config: JobConfig, trainer: Trainer, folder: Path, starts: Starts) -> tuple[int, str]:
    """Load what there is to go on from; returns how many steps are done, and the job's id.

    With ``checkpoint.resume=last_good``, damaged checkpoints newer than that lose their names.
    """
    saved = from_rank_zero(lambda: to_resume(config))
    if saved is None:
        return 0, from_rank_zero(new_job_id)
    try:
        done, job_id = _load(config, trainer, saved, starts)
    except DamagedError as error:
        if config.checkpoint.resume != "last_good":
            raise from_rank_zero(lambda error=error: not_resumed(config, error)) from error
        from_rank_zero(lambda error=error: set_aside(error.path, error.why))
        return _resume(config, trainer, folder, starts)
    if config.checkpoint.resume == "last_good":
        from_rank_zero(lambda: set_aside_newer(saved.path))
    return done, job_id


def _load(config: JobConfig, trainer: Trainer, saved: Saved, starts: Starts) -> tuple[int, str]:
    if not saved.has_optimizers:
        _start_from_weights(config, trainer, saved)
        return 0, from_rank_zero(new_job_id)
    _check_same_job(config, trainer, saved)
    check_starts(config, starts, saved, trainer.plan)
    if not _is_like(trainer.state_dict(), saved.job["state"]):
        raise damaged(saved.path, "job.json.state is not what this stage saves")
    load_checkpoint(saved, trainer.models, verify=config.checkpoint.verify)
    trainer.num_skipped = saved.job["skipped_steps"]
    trainer.load_state_dict(saved.job["state"])
    return saved.step, saved.job["job_id"] or from_rank_zero(new_job_id)


def _is_like(own: dict[str, Any], found: dict[str, Any]) -> bool:
    """Whether JSON values have the keys and types of ``own``, and numbers are finite."""
    return own.keys() == found.keys() and all(
        type(found[name]) is type(value)
        and not (isinstance(value, float) and not math.isfinite(found[name]))
        for name, value in own.items()
    )


def _start_from_weights(config: JobConfig, trainer: Trainer, saved: Saved) -> None:
    """Load the weights of the trained models that the checkpoint has; it may have some alone."""
    roles = [role for role in trained_roles(config) if role in saved.models]
    if not roles:
        raise ValueError(
            f"{saved.path} has weights of the {', '.join(saved.models)}, and stage {config.stage}"
            f" trains the {' and '.join(trained_roles(config))}: name another checkpoint.dir"
        )
    _check_same_models(config, trainer, saved, roles)
    others = [role for role in role_names(config) if role not in roles]
    kept = "".join(f"; the {role} keeps those of its own config" for role in others)
    _logger.warning("starting from the weights in %s%s", saved.path, kept)
    models = trainer.models
    wanted = {role: models[role] for role in roles if role in models}
    load_checkpoint(saved, wanted, verify=config.checkpoint.verify)


_UNKNOWN = "unknown"  # in place of a value that an older version did not save
_CURE = "restore it, or start anew with another output_dir"


def _check_same_models(
    config: JobConfig, trainer: Trainer, saved: Saved, roles: Iterable[str]
) -> None:
    for role in roles:
        if saved.metadata(role)["model"] != to_hf_config(trainer.plan.trained[role].model):
            _, key = role_model(config, role)
            raise ValueError(f"{saved.path} is of another model than {key}: {_CURE}")


def _check_same_job(config: JobConfig, trainer: Trainer, saved: Saved) -> None:
    """Raise a one-line ValueError if resuming would not continue the same run."""
    old, new = (_whole(tree) for tree in (saved.job["config"], asdict(config)))
    stage = old.get("stage", _UNKNOWN)
    if stage != config.stage:
        raise ValueError(f"stage is {config.stage}, but {shown(stage)} in {saved.path}: {_CURE}")
    roles = trained_roles(config)
    _check_same_models(config, trainer, saved, roles)
    # One precision for all of a job's models.
    own, was = trainer.plan.trained[roles[0]].options.dtype, saved.metadata(roles[0])["dtype"]
    if own != was:
        raise ValueError(f"engine.dtype is {own}, but {was} in {saved.path}: {_CURE}")
    # Ready rows are drawn by the row: there the packing says which examples a step holds.
    packing = ("packing",) if config.packing.scope == "dataset" else ()
    for name in (*binding_keys(JobConfig, config.stage), *packing):
        for key, was, value in _differences(name, _value(old, name), _value(new, name)):
            values = f"{shown(key)} is {shown(value)}, but {shown(was)}"
            raise ValueError(f"{values} in {saved.path}: {_CURE}")
    if saved.job["data"] != trainer.data_fingerprint:
        raise ValueError(f"{saved.path} was trained on other data (data.*, tokenizer.*): {_CURE}")
    if saved.step > trainer.num_steps:
        raise ValueError(
            f"{saved.path} is at step {saved.step}, past the job's {trainer.num_steps} steps:"
            " raise max_steps or num_train_epochs"
        )


def _whole(config: dict[str, Any]) -> dict[str, Any]:
    """A config as JSON has it, the critic's optimizer filled in."""
    whole = json.loads(json.dumps(config))
    critic = whole.get("critic", {})
    critic["optimizer"] = critic.get("optimizer") or whole.get("optimizer")
    return whole


def _differences(name: str, old: Any, new: Any) -> Iterator[tuple[str, Any, Any]]:
    """``(dotted key, old value, new value)`` of every value that differs."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in {**old, **new}:
            yield from _differences(f"{name}.{key}", old.get(key, _UNKNOWN), new.get(key))
    elif old != new:
        yield name, old, new


def _value(tree: Any, name: str) -> Any:
    for part in name.split("."):
        tree = tree.get(part, _UNKNOWN) if isinstance(tree, dict) else _UNKNOWN
    return tree
