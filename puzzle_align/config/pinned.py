"""Which checkpoints a job starts from, where it names folders of them.

A run that is still at work in a folder may finish a checkpoint any moment, and delete an older one.
Invariants (the tests assert them):
- one rank looks, once the ranks have met, and all of them read what it found;
- a run that is resumed reads what it began with, whatever else is there by then.
"""

from dataclasses import replace
from pathlib import Path

from puzzle_align.config.job import JobConfig
from puzzle_align.config.model_path import is_checkpoint, named_model
from puzzle_align.config.roles import (
    ROLES,
    role_model,
    role_names,
    tokenizer_config,
)
from puzzle_align.config.saved import Saved, is_checkpoint_of
from puzzle_align.config.sections.models import RoleConfig


def names_checkpoints(job: JobConfig) -> bool:
    """Whether what a path names may change between one rank's look at it and another's."""
    paths = (getattr(job, role).model.path for role in ROLES)
    return any(path is not None and is_checkpoint(Path(path)) for path in paths)


def pin_models(job: JobConfig) -> JobConfig:
    """The job that says which checkpoint it takes where it names a folder of them.

    It also says which tokenizer, where that is a model's: who reads this job's own checkpoints then
    needs no others.

    Raises:
        ValueError: one line, for a path that names no model.
    """
    job = replace(job, tokenizer=tokenizer_config(job))
    for role, path in _paths(job).items():
        named = named_model(path, f"{role}.model")
        if named.saved is not None:
            job = _with_path(job, role, str(named.path))
    return job


def keep_models(job: JobConfig, saved: Saved) -> tuple[JobConfig, list[str]]:
    """The job with the checkpoints that it began with, in place of the folders that hold them.

    Args:
        saved: what the job goes on from; one of weights alone (no optimizer) binds to nothing.

    Returns:
        the job, and a line for every path that it changed.

    Raises:
        ValueError: one line, if one of those checkpoints is gone.
    """
    began = saved.job.get("config", {})
    kept: list[str] = []
    if not saved.has_optimizers:
        return job, kept
    for role, path in _paths(job).items():
        was = began.get(role, {}).get("model", {}).get("path")
        if was is None or not is_checkpoint(Path(path)) or not is_checkpoint_of(was, path):
            continue
        if not (Path(was) / "job.json").is_file():
            raise ValueError(
                f"{role}.model.path: the job in {saved.path} began with {was}, which is gone: put "
                "it back, or start anew with another output_dir"
            )
        kept.append(f"{role}.model.path={path}: going on with {was}, which the job began with")
        job = _with_path(job, role, was)
    return job, kept


def _paths(job: JobConfig) -> dict[str, str]:
    """The paths of the models that the job uses, by the role that has each."""
    models = (role_model(job, role) for role in role_names(job))
    return {key.partition(".")[0]: own.path for own, key in models if own.path is not None}


def _with_path(job: JobConfig, role: str, path: str) -> JobConfig:
    own: RoleConfig = getattr(job, role)
    return replace(job, **{role: replace(own, model=replace(own.model, path=path))})
