"""The files and folders that a job names, checked before anything is built or written."""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TypeVar

from puzzle_align.config.job import JobConfig
from puzzle_align.config.resolve import RoleModel
from puzzle_align.config.saved import (
    DAMAGED,
    Saved,
    checkpoint_paths,
    find_checkpoint,
    last_good,
)
from puzzle_align.files.messages import shown_path
from puzzle_align.stages.weights import role_weights
from puzzle_align.telemetry.sinks import check_wandb

T = TypeVar("T")


def attempt(lines: list[str], check: Callable[[], T]) -> T | None:
    """Run ``check``; of a ValueError, add the line to ``lines``, once, and return None."""
    try:
        return check()
    except ValueError as error:
        line = " ".join(str(error).split())
        if line not in lines:
            lines.append(line)
        return None


def cache_folder(config: JobConfig) -> Path:
    """The folder of tokenized data and reference tables."""
    return Path(config.data.cache_dir or Path(config.output_dir) / "cache")


def check_same(found: Mapping[str, str], wanted: Mapping[str, str]) -> None:
    """Raise a one-line ValueError for data whose fingerprint is not the one that rank 0 has.

    Args:
        found: fingerprints of this node's data, by the config's keys; ``wanted``: rank 0's.
    """
    for key, fingerprint in wanted.items():
        if found.get(key) != fingerprint:
            raise ValueError(
                f"{key}: what is read here is not what rank 0 reads: copy it and the tokenizer here"
                " again, and rank 0's data.cache_dir in place of this node's"
            )


def checkpoint_folder(config: JobConfig) -> Path:
    """The folder of the job's checkpoints."""
    return Path(config.checkpoint.dir or Path(config.output_dir) / "checkpoints")


def to_resume(config: JobConfig) -> Saved | None:
    """The checkpoint that the job goes on from, None to start anew.

    Of several it is the last good one, as far as that is seen without reading tensors.

    Raises:
        ValueError: if ``checkpoint.resume`` does not go with what is there.
    """
    folder, resume = checkpoint_folder(config), config.checkpoint.resume
    paths = checkpoint_paths(folder)
    if resume not in ("auto", "must"):
        return _named(Path(resume), paths, verify=config.checkpoint.verify)
    if paths:
        return last_good(paths, verify=config.checkpoint.verify)
    if resume == "must":
        raise ValueError(f"checkpoint.resume=must: no checkpoint in {folder}; set it to auto")
    for aside in sorted(folder.glob(f"{DAMAGED}step_*")):
        raise ValueError(
            f"{folder} holds damaged checkpoints alone ({aside.name}): move them away to start"
            " anew, or choose another output_dir"
        )
    return None


def _named(path: Path, paths: list[Path], *, verify: bool) -> Saved:
    """The checkpoint that ``checkpoint.resume`` names.

    Args:
        paths: the checkpoints in the job's folder, where it will save: none of another run, and
            none later than that.
    """
    if not path.is_dir():
        raise ValueError(
            f"checkpoint.resume: {shown_path(path)}: no such directory; give auto, must or a"
            " checkpoint's path"
        )
    try:
        saved = find_checkpoint(path)
        saved.check(verify=verify)
    except ValueError as error:
        raise ValueError(f"checkpoint.resume: {error}") from error
    if paths and paths[-1].resolve() != saved.path.resolve():
        raise ValueError(
            f"checkpoint.resume={path}: {paths[-1]} is there too and would be mixed with this run:"
            " set it to auto to go on from there, or choose another output_dir"
        )
    return saved


def check_weights(models: Iterable[RoleModel], config: JobConfig) -> list[str]:
    """Check the weights of a job's models: a line for each fault; only headers are read."""
    lines: list[str] = []
    for model in models:
        attempt(lines, lambda model=model: _check_weights(model, config))
    return lines


def check_folders(config: JobConfig) -> list[str]:
    """Check the folders that a job writes to, and wandb: a line for each fault.

    Any process may ask: nothing is written.
    """
    lines: list[str] = []
    for key, path in (
        ("output_dir", Path(config.output_dir)),
        ("checkpoint.dir", checkpoint_folder(config)),
        ("data.cache_dir", cache_folder(config)),
    ):
        if key == "output_dir" or not path.is_relative_to(config.output_dir):
            lines += _folder_problems(key, path)
    attempt(lines, lambda: check_wandb(config.telemetry.wandb_project))
    return lines


def _check_weights(model: RoleModel, config: JobConfig) -> None:
    if model.source is None:
        return
    try:
        role_weights(model, config).check()
    except ValueError as error:
        raise ValueError(f"{model.key}.path: {error}") from error


def _folder_problems(key: str, folder: Path) -> Iterator[str]:
    """Why a folder cannot be made or written to; it is not made here."""
    nearest = folder.absolute()
    while not nearest.exists():
        nearest = nearest.parent
    if not nearest.is_dir():
        yield f"{key}: {folder} cannot be made: {nearest} is a file; name another folder"
    elif not os.access(nearest, os.W_OK | os.X_OK):
        yield f"{key}: {folder} cannot be written: {nearest} is read-only; name another folder"
