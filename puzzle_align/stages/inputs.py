"""Check the files and folders that a job names before anything is built or written."""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from puzzle_align.config.job import JobConfig
from puzzle_align.config.resolve import Job, RoleModel
from puzzle_align.config.roles import role_lora
from puzzle_align.config.saved import (
    DAMAGED,
    DamagedError,
    Saved,
    checkpoint_paths,
    damaged,
    find_checkpoint,
    last_good,
    open_checkpoint,
)
from puzzle_align.files.messages import reading, shown_path
from puzzle_align.layout.model import without_adapters
from puzzle_align.models.hf.adapters import adapter_problems
from puzzle_align.stages.weights import role_weights
from puzzle_align.telemetry.sinks import check_wandb

T = TypeVar("T")


def attempt(lines: list[str], check: Callable[[], T]) -> T | None:
    """Run ``check``; on a ValueError, add its line to ``lines``, once, and return None."""
    try:
        return check()
    except ValueError as error:
        line = " ".join(str(error).split())
        if line not in lines:
            lines.append(line)
        return None


def cache_folder(config: JobConfig) -> Path:
    """Folder of tokenized data and reference tables."""
    return Path(config.data.cache_dir or Path(config.output_dir) / "cache")


def checkpoint_folder(config: JobConfig) -> Path:
    """Folder of the job's checkpoints."""
    return Path(config.checkpoint.dir or Path(config.output_dir) / "checkpoints")


def to_resume(config: JobConfig) -> Saved | None:
    """Find the checkpoint to resume from; None to start anew.

    It is the last good one, judged without reading tensors.

    Raises:
        ValueError: if ``checkpoint.resume`` does not fit the checkpoints in the folder.
    """
    folder, resume = checkpoint_folder(config), config.checkpoint.resume
    with reading(folder):
        paths = checkpoint_paths(folder)
    if config.checkpoint.names_path and not is_started_again(paths, resume):
        with reading(Path(resume), key="checkpoint.resume"):
            return _named(Path(resume), paths)
    if paths:
        return last_good(paths)
    for aside in sorted(folder.glob(f"{DAMAGED}step_*")):
        anew = "start anew" if resume == "auto" else "start anew with checkpoint.resume=auto"
        raise ValueError(
            f"{folder} holds only damaged checkpoints ({aside.name}): move them away, or choose"
            f" another output_dir, to {anew}"
        )
    if resume == "must":
        raise ValueError(f"checkpoint.resume=must: no checkpoint in {folder}; set it to auto")
    return None


def is_started_again(paths: list[Path], resume: str) -> bool:
    """Whether the last checkpoint is of a run that began from the path, as this one would.

    So a scheduler may run the same command again (Slurm's requeue).
    """
    try:
        saved = open_checkpoint(paths[-1]) if paths else None
    except ValueError:
        return False
    return saved is not None and saved.job["config"].get("checkpoint", {}).get("resume") == resume


def is_one_good(paths: list[Path]) -> bool:
    """Whether one of the checkpoints can replace a damaged one."""
    try:
        return bool(paths and last_good(paths))
    except DamagedError:
        return False


def cure_of_named(paths: list[Path]) -> str:
    """Cure where ``checkpoint.resume`` names a damaged one of ``paths``, the job's own."""
    if is_one_good(paths):
        return "set checkpoint.resume=auto, which takes the last good one"
    anew = "set checkpoint.resume=auto and another output_dir to start anew"
    return f"none before it is good; name another run's checkpoint, or {anew}"


def _named(path: Path, paths: list[Path]) -> Saved:
    """Open the checkpoint that ``checkpoint.resume`` names.

    Args:
        paths: checkpoints in the job's own folder: the named one must be the last, if any exist,
            and is returned as the folder's, however its path is written.
    """
    if not path.is_dir():
        raise ValueError(
            f"checkpoint.resume: {shown_path(path)}: no such directory; give auto, must or a"
            " checkpoint's path"
        )
    try:
        saved = find_checkpoint(path)
        saved.check()
    except ValueError as error:
        why = error
        own_paths = {each.resolve() for each in paths}
        if isinstance(error, DamagedError) and error.path.resolve() in own_paths:
            why = damaged(error.path, error.why, cure_of_named(paths))
        raise ValueError(f"checkpoint.resume: {why}") from error
    if not paths:
        return saved
    if paths[-1].resolve() != saved.path.resolve():
        raise ValueError(
            f"checkpoint.resume={path}: {paths[-1]} exists too and would be mixed with this run:"
            " set it to auto to resume from that one, or choose another output_dir"
        )
    return replace(saved, path=paths[-1])


def named_folders(job: Job) -> dict[str, Path]:
    """Folders of a job's models and tokenizer on this node, by the keys that name them."""
    folders = {
        f"{model.key}.path": model.source.path
        for model in job.models.values()
        if model.source is not None
    }
    if job.tokenizer.path is not None:
        folders["tokenizer.path"] = Path(job.tokenizer.path)
    # Not Path.exists, which raises in a folder closed to this user: who opens the files says so.
    return {key: folder for key, folder in folders.items() if os.path.exists(folder)}


def check_seen(folders: Mapping[str, Path]) -> None:
    """Raise a one-line ValueError for a folder, by its key, that this node does not see."""
    for key, folder in folders.items():
        with reading(folder, key=key):
            is_there = folder.exists()
        if not is_there:
            raise ValueError(
                f"{key}: {shown_path(folder)}: no such directory there: copy it from rank 0's node,"
                " or put it where all nodes see it"
            )


def check_weights(models: Iterable[RoleModel], config: JobConfig) -> list[str]:
    """Check the weights of a job's models: a line for the first fault of each; reads headers."""
    lines: list[str] = []
    for model in models:
        attempt(lines, lambda model=model: _check_weights(model, config))
    return lines


def check_folders(config: JobConfig) -> list[str]:
    """Check the folders that a job writes to, and wandb: a line for each fault.

    Writes nothing, so any process may call it.
    """
    lines: list[str] = []
    for key, path in (
        ("output_dir", Path(config.output_dir)),
        ("checkpoint.dir", checkpoint_folder(config)),
        ("data.cache_dir", cache_folder(config)),
    ):
        is_below = key != "output_dir" and path.is_relative_to(config.output_dir)
        if not is_below or os.path.exists(path):  # else it would be made in output_dir
            lines += _folder_problems(key, path)
    attempt(lines, lambda: check_wandb(config.telemetry.wandb_project))
    return lines


def _check_weights(model: RoleModel, config: JobConfig) -> None:
    """Raise a one-line ValueError for the first fault, by the key that names the files.

    With adapters from files the base is checked first: a fault of its files is not theirs.
    """
    lora, key = model.lora, f"{model.key}.path"
    if lora is not None and lora.path is not None and model.spec.lora is not None:
        _check_weights(replace(model, spec=without_adapters(model.spec), lora=None), config)
        section = role_lora(config, model.role)[1]
        for problem in adapter_problems(lora.path, model.spec.lora, section):
            raise ValueError(problem)
        key = f"{section}.path"
    try:
        role_weights(model, config).check()
    except ValueError as error:
        raise ValueError(f"{key}: {error}") from error


def _folder_problems(key: str, folder: Path) -> Iterator[str]:
    """Reasons why a folder cannot be made or written to; it is not made."""
    nearest = folder.absolute()
    while not os.path.exists(nearest):  # Path.exists raises in a folder closed to this user
        nearest = nearest.parent
    if not nearest.is_dir():
        yield f"{key}: {folder} cannot be made: {nearest} is a file; name another folder"
    elif not os.access(nearest, os.W_OK | os.X_OK):
        yield f"{key}: {folder} cannot be written: {nearest} is read-only; name another folder"
