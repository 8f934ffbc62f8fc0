"""Resume a job from a checkpoint of the same job on the same data."""

import logging
import math
from collections.abc import Iterable
from dataclasses import asdict, replace
from typing import Any

from puzzle_align.config.check_resumed import (
    CURE,
    UNKNOWN,
    check_same_config,
    check_same_data,
    written,
)
from puzzle_align.config.resolve import Job
from puzzle_align.config.saved import (
    START_ANEW,
    DamagedError,
    Saved,
    checkpoint_paths,
    damaged,
    unlike,
)
from puzzle_align.files.json_file import as_json, differences
from puzzle_align.files.messages import shown
from puzzle_align.layout.hf_config import to_hf_config
from puzzle_align.layout.model import AttentionBackend
from puzzle_align.runtime.checkpoint.folder import set_aside, set_aside_damaged
from puzzle_align.runtime.checkpoint.models import load_checkpoint, new_job_id
from puzzle_align.runtime.groups.collectives import from_rank_zero
from puzzle_align.stages.inputs import (
    checkpoint_folder,
    cure_of_named,
    is_one_good,
    is_started_again,
    to_resume,
)
from puzzle_align.stages.trainer import Trainer
from puzzle_align.stages.weights import Starts, check_starts

_logger = logging.getLogger(__name__)


def resume(
    job: Job, trainer: Trainer, starts: Starts, saved: Saved | None
) -> tuple[int, dict[str, Any]]:
    """Load the checkpoint to resume from, if any; return the steps done and the job's origin.

    The origin is equal in all of the job's checkpoints: its id, and its models' initial weights at
    the first start. If the checkpoint's tensors are damaged, it is renamed, and the one before it
    is loaded. Damaged checkpoints later than the loaded one are renamed, too.
    """
    config = job.config.checkpoint
    if saved is None:
        return 0, _origin(starts)
    paths = from_rank_zero(lambda: checkpoint_paths(checkpoint_folder(job.config)))
    place = paths.index(saved.path) if saved.path in paths else len(paths)
    try:
        done, origin = _load(job, trainer, saved, starts)
    except DamagedError as error:
        # Tensors are verified while they are read; the error is the same on all ranks.
        again = from_rank_zero(lambda: is_started_again(paths, config.resume))
        is_named = config.names_path and not again
        if is_named and saved.path in paths:
            cure = from_rank_zero(lambda: cure_of_named(paths[:place]))
            raise damaged(error.path, error.why, cure) from error
        if is_named:
            raise
        if not from_rank_zero(lambda: is_one_good(paths[:place])):
            raise damaged(error.path, error.why, START_ANEW) from error
        from_rank_zero(lambda error=error: set_aside(error.path, error.why))
        return resume(job, trainer, starts, from_rank_zero(lambda: to_resume(job.config)))
    from_rank_zero(lambda: set_aside_damaged(paths[place + 1 :]))
    return done, origin


def _origin(starts: Starts, job_id: str = "") -> dict[str, Any]:
    """Values that are equal in all checkpoints of a job; without an id, those of a new job."""
    return {
        "job_id": job_id or from_rank_zero(new_job_id),
        "starts": {role: asdict(start) for role, start in starts.items()},
    }


def _load(job: Job, trainer: Trainer, saved: Saved, starts: Starts) -> tuple[int, dict[str, Any]]:
    if not saved.has_optimizers:
        _start_from_weights(job, trainer, saved)
        return 0, _origin(starts)
    _check_same_job(job, trainer, saved)
    check_starts(job, starts, saved)
    if not _is_like(trainer.state_dict(), saved.job["state"]):
        raise unlike(saved.path, "job.json.state is not what this stage saves")
    load_checkpoint(saved, trainer.models)
    trainer.num_skipped = saved.job["skipped_steps"]
    trainer.load_state_dict(saved.job["state"])
    began: Starts = saved.job["starts"]
    moved = {role: replace(began.get(role, s), path=s.path) for role, s in starts.items()}
    return saved.step, _origin(moved, saved.job["job_id"])


def _is_like(expected: Any, saved: Any) -> bool:
    """Whether saved JSON values have the same keys and types, and finite numbers."""
    if type(saved) is not type(expected):
        return False
    if isinstance(expected, dict):
        return expected.keys() == saved.keys() and all(
            _is_like(expected[name], saved[name]) for name in expected
        )
    return not isinstance(expected, float) or math.isfinite(saved)


def _start_from_weights(job: Job, trainer: Trainer, saved: Saved) -> None:
    """Load the trained models' weights from the checkpoint, which may have only some of them."""
    roles = [role for role in job.plan.trained if role in saved.models]
    if not roles:
        raise ValueError(
            f"{saved.path} has weights of the {', '.join(saved.models)}, and stage"
            f" {job.config.stage} trains the {' and '.join(job.plan.trained)}: name another"
            " checkpoint.dir"
        )
    _check_same_models(job, saved, roles)
    others = [role for role in job.models if role not in roles]
    kept = "".join(f"; the {role} keeps those of its own config" for role in others)
    _logger.warning("starting from the weights in %s%s", saved.path, kept)
    models = trainer.models
    wanted = {role: models[role] for role in roles if role in models}
    load_checkpoint(saved, wanted)


def _check_same_models(job: Job, saved: Saved, roles: Iterable[str]) -> None:
    for role in roles:
        model, about = job.models[role], saved.metadata(role)
        was, now = about["model"], to_hf_config(model.spec)
        if (was, about["lora"]) == (now, model.spec.lora):
            continue
        what = f"{saved.path} is of another model than {model.key}"
        for key, old, new in differences("", as_json(was), as_json(now), UNKNOWN):
            values = f"{shown(key)} is {written(new)}, but {written(old)} there"
            raise ValueError(f"{what}: {values}: {CURE}")
        raise ValueError(f"{what}, or has other adapters: {CURE}")


def _check_same_job(job: Job, trainer: Trainer, saved: Saved) -> None:
    """Raise a one-line ValueError if the checkpoint is of another run."""
    check_same_config(job.config, saved)
    roles = list(job.plan.trained)
    _check_same_models(job, saved, roles)
    # All models of a job have one precision.
    dtype, was = job.engine.options.dtype, saved.metadata(roles[0])["dtype"]
    if dtype != was:
        raise ValueError(f"engine.dtype is {dtype}, but {was} in {saved.path}: {CURE}")
    check_same_data(job.config, saved, trainer.data_fingerprint)
    # From tokenizer and model, if generation.stop_token_ids is null; older versions saved none.
    stops = [*trainer.stop_token_ids]
    if (before := saved.job.get("stop_token_ids", stops)) != stops:
        raise ValueError(
            f"responses end with tokens {shown(stops)}, but {shown(before)} in {saved.path}"
            f" (tokenizer.path, or the model's generation_config.json, is another): {CURE}"
        )
    if saved.step > trainer.num_steps:
        raise ValueError(
            f"{saved.path} is at step {saved.step}, past the job's {trainer.num_steps} steps:"
            " raise max_steps or num_train_epochs"
        )


def attention_of(saved: Saved) -> AttentionBackend | None:
    """Attention of a saved run on CUDA; None if the checkpoint does not name it.

    It is also None for a checkpoint of weights alone, which need not continue with the same.
    """
    return saved.job.get("attention") if saved.has_optimizers else None
