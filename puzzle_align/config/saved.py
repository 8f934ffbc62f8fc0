"""Checkpoints on disk, as their ``job.json`` describes them: found and read, no tensor looked at.

A checkpoint is a directory ``step_00000123`` with a ``job.json``; ``runtime.checkpoint_folder``
makes it, and tells what a directory of that name promises.
"""

import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from puzzle_align.config.stages import STAGES

_NAME = re.compile(r"step_(\d{8,})")


@dataclass(frozen=True)
class Saved:
    """A whole checkpoint on disk.

    ``job`` is what was saved beside the tensors, the caller's values and these two. ``models`` says
    by role: ``model`` (as in a ``config.json``), ``dtype``, ``world_size`` (the model's ranks),
    ``has_optimizer``. ``frozen`` says so of models that only the same run goes on with.
    """

    path: Path
    step: int
    models: dict[str, dict[str, Any]]
    job: dict[str, Any]
    frozen: dict[str, dict[str, Any]] = field(default_factory=dict)

    def metadata(self, role: str) -> dict[str, Any]:
        """What ``models`` says of a role.

        Raises:
            ValueError: naming the roles that are there, if it is none of them.
        """
        if role in self.frozen:
            return self.frozen[role]
        if role not in self.models:
            raise ValueError(f"{self.path} holds no {role}: name one of {', '.join(self.models)}")
        return self.models[role]

    @property
    def has_optimizers(self) -> bool:
        """Whether training can go on from it, rather than start from its weights."""
        return all(about["has_optimizer"] for about in self.models.values())

    @property
    def main_role(self) -> str:
        """The role that its job's stage is about.

        Raises:
            ValueError: if no job is described.
        """
        try:
            return STAGES[self.job["config"]["stage"]].trained[0]
        except (KeyError, TypeError) as error:
            raise damaged(self.path, cause(error)) from error

    @property
    def tokenizer(self) -> dict[str, Any]:
        """The ``tokenizer`` section of its job, the path filled in; null: the job's was 'byte'.

        Raises:
            ValueError: if no job is described.
        """
        role = self.main_role
        try:
            config = self.job["config"]
            path = config["tokenizer"]["path"] or config[role]["model"]["path"]
            return {**config["tokenizer"], "path": path}
        except (KeyError, TypeError) as error:
            raise damaged(self.path, cause(error)) from error


def find_checkpoint(path: Path) -> Saved:
    """The checkpoint that a user means: ``path`` itself, or the latest in it or its checkpoints.

    Raises:
        ValueError: if there is none, or it is damaged.
    """
    if (path / "job.json").is_file():
        return open_checkpoint(path)
    folders = (path, path / "checkpoints")
    for folder in folders:
        latest = find_latest(folder)
        if latest is not None:
            return latest
    if any(True for folder in folders for _ in folder.glob(".saving_*")):
        raise ValueError(f"{path}: no checkpoint there is finished; wait for one, or name another")
    raise ValueError(
        f"{path}: no checkpoint there; give a step_* directory, or the folder that holds them"
    )


def find_latest(folder: Path) -> Saved | None:
    """The checkpoint with the largest step, or None."""
    paths = checkpoint_paths(folder)
    return open_checkpoint(paths[-1]) if paths else None


def checkpoint_paths(folder: Path) -> list[Path]:
    """The checkpoints in a folder, by step."""
    named = {p: _NAME.fullmatch(p.name) for p in folder.glob("step_*")}
    return sorted((p for p, match in named.items() if match), key=lambda p: int(p.name[5:]))


def is_checkpoint_of(path: str, folder: str) -> bool:
    """Whether a path is that of a checkpoint, there or not, in a folder or its checkpoints."""
    parents = (Path(folder).resolve(), (Path(folder) / "checkpoints").resolve())
    return _NAME.fullmatch(Path(path).name) is not None and Path(path).parent.resolve() in parents


def open_checkpoint(path: Path) -> Saved:
    """Read a checkpoint's ``job.json``.

    Raises:
        ValueError: if there is none, or it is damaged.
    """
    file = path / "job.json"
    if not file.is_file():
        raise ValueError(f"{path} is not a checkpoint (no job.json): give a step_* directory")
    try:
        job = json.loads(file.read_text())
        kept, frozen = {}, {}
        for role, about in job["models"].items():
            (frozen if about.get("is_frozen") else kept)[role] = about
        return Saved(path, job["step"], kept, job, frozen)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise damaged(path, cause(error)) from error


def damaged(path: Path, why: str) -> ValueError:
    """What to raise where a checkpoint cannot be read."""
    return ValueError(
        f"checkpoint {path} is damaged or incomplete ({why}): move that directory away,"
        " and the one before it is taken"
    )


def cause(error: BaseException) -> str:
    """What went wrong, in one short line."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:200]}"
