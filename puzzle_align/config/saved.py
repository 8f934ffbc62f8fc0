"""Checkpoints on disk: finding, opening and checking them; no tensor is read.

A checkpoint is a directory ``step_00000123`` with tensors, ``job.json`` (the metadata) and
``checksums.json`` of all other files (``Manifest``). ``runtime.checkpoint.folder`` writes it and
states what a directory of that name guarantees. Invariants (the tests assert them):
- a value of an unexpected type in either file is a one-line error;
- small files are verified on every read, tensors when they are loaded, so a file of another step,
  of another job or with one bit changed is never used;
- damage (a missing or changed file) is distinguished from a read error of the machine and from a
  checkpoint of another version: these two may be intact, and are left untouched.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from puzzle_align.config.job import JobConfig
from puzzle_align.config.schema import Key, section_keys
from puzzle_align.config.sections.data import TokenizerConfig
from puzzle_align.config.stages import STAGES
from puzzle_align.files.checksums import PieceSums, missing, unsealed
from puzzle_align.files.messages import reading, shown
from puzzle_align.files.typed import AGAIN, from_plain
from puzzle_align.layout.model import LoraSpec

JOB, CHECKSUMS = "job.json", "checksums.json"
DAMAGED = "damaged_"  # prefix of the name of a damaged checkpoint that was moved aside
# The cure where a job's checkpoints are all damaged.
START_ANEW = "none before it is good; move all away to start anew, or choose another output_dir"
_NAME = re.compile(r"step_(\d{8,})")


class DamagedError(ValueError):
    """A checkpoint differs from what was saved."""

    path: Path
    why: str


def damaged(path: Path, why: str, cure: str | None = None) -> DamagedError:
    """The error for a damaged checkpoint; the usual cure names the one before it."""
    paths = checkpoint_paths(path.parent)
    earlier = paths[: paths.index(path)] if path in paths else []
    other = f"take {earlier[-1].name}, the one before it" if earlier else "take another"
    error = DamagedError(f"checkpoint {path} is damaged or incomplete ({why}): {cure or other}")
    error.path, error.why = path, why
    return error


def unlike(path: Path, why: str) -> ValueError:
    """The error for a checkpoint of another version, which may be intact."""
    return ValueError(
        f"checkpoint {path} is not what this version saves ({why}), and is left as it is: go on"
        " with the version that saved it, or move that directory away"
    )


class UnreadableError(ValueError):
    """A checkpoint cannot be read now, but may be intact."""


def unreadable(path: Path, error: BaseException) -> UnreadableError:
    """The error for failing memory, disk or network; the checkpoint is left untouched."""
    why = cause(error)
    if isinstance(error, OSError):
        why = f"{Path(error.filename or path).name}: {error.strerror or why}"
    return UnreadableError(
        f"checkpoint {path} cannot be read now ({why}), and is left as it is: see to the machine's"
        " memory, disk or network, and run the same command again"
    )


def not_read(path: Path, error: OSError, name: str | None = None) -> ValueError:
    """The error for a file that could not be read: DamagedError if it is missing.

    ``name`` is the file's; None: the error's ``filename``.
    """
    try:
        return damaged(path, missing(path / (name or Path(error.filename or path).name), error))
    except OSError as other:
        return unreadable(path, other)


def cause(error: BaseException) -> str:
    """The error's type and first line, shortened."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:200]}"


@dataclass(frozen=True)
class Manifest:
    """``checksums.json``: step, job, and checksums of the other files."""

    step: int
    job_id: str
    files: dict[str, PieceSums]  # by name


@dataclass(frozen=True)
class _SavedModel:
    """A model's entry in ``job.json``."""

    model: dict[str, Any]
    dtype: Literal["fp32", "bf16"]
    world_size: int
    has_optimizer: bool
    plan: dict[str, Any] = field(default_factory=dict)  # parallel plan
    lora: LoraSpec | None = None  # adapters: they are saved, and their base is not
    is_frozen: bool = False


@dataclass(frozen=True)
class Start:
    """A model at the job's start: path, dimensions, and a hash of its weights.

    ``role`` is that of the model in the checkpoint at the path, if it is one.
    """

    path: str | None
    model: dict[str, Any]
    weights_xxh3: str
    role: str = ""


@dataclass(frozen=True)
class _Job:
    """The required and optional values of ``job.json``; others are allowed."""

    step: int
    models: dict[str, dict[str, Any]]
    job_id: str = ""
    starts: dict[str, dict[str, Any]] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    data: str = ""
    skipped_steps: int = 0
    attention: str | None = None
    state: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Saved:
    """A complete checkpoint on disk.

    ``job`` is the content of ``job.json``: ``step``, ``models`` and the caller's values. ``models``
    has by role: ``model`` (as in a ``config.json``), ``dtype``, ``world_size`` (the model's ranks),
    ``plan``, ``has_optimizer``. ``frozen`` has the same for models that only a resume of this run
    reads.
    """

    path: Path
    step: int
    models: dict[str, dict[str, Any]]
    job: dict[str, Any]
    manifest: Manifest
    frozen: dict[str, dict[str, Any]] = field(default_factory=dict)

    def metadata(self, role: str) -> dict[str, Any]:
        """A role's entry in ``models`` or ``frozen``; else a ValueError that lists the roles."""
        if role in self.frozen:
            return self.frozen[role]
        if role not in self.models:
            roles = shown(", ".join(self.models))
            raise ValueError(f"{self.path} holds no {shown(role)}: name one of {roles}")
        return self.models[role]

    @property
    def has_optimizers(self) -> bool:
        """Whether training can resume from it, rather than start from its weights."""
        return all(model["has_optimizer"] for model in self.models.values())

    @property
    def main_role(self) -> str:
        """The main role of its job's stage; DamagedError if it names no stage."""
        stage = self.job["config"].get("stage")
        if stage not in STAGES:
            raise damaged(self.path, f"{JOB} names no stage")
        return STAGES[stage].trained[0]

    @property
    def tokenizer(self) -> dict[str, Any]:
        """Its job's ``tokenizer`` section with the path filled in (None: bytes).

        DamagedError if it names no stage or tokenizer.
        """
        role = self.main_role
        config = self.job["config"]
        try:
            path = config["tokenizer"]["path"] or config[role]["model"]["path"]
        except (KeyError, TypeError) as error:
            raise damaged(self.path, f"{JOB} names no tokenizer") from error
        known = {item.name for item in fields(TokenizerConfig)}
        values = {name: value for name, value in config["tokenizer"].items() if name in known}
        return {**values, "path": path}

    def read(self, name: str) -> bytes:
        """Read a small file, verified; ValueError if it is missing, damaged or unreadable."""
        return _read(self.path, name, self.manifest)

    def sums(self, name: str) -> PieceSums:
        """Checksums of a file; DamagedError if there are none."""
        if name not in self.manifest.files:
            raise damaged(self.path, f"{name} is not in {CHECKSUMS}")
        return self.manifest.files[name]

    def check(self) -> None:
        """Check that all files exist in their sizes, and the content of the small ones.

        Tensors are verified when they are loaded.

        Raises:
            DamagedError: one line.
            UnreadableError: one line.
        """
        for name, sums in self.manifest.files.items():
            judge = sums.size_problem if name.endswith(".distcp") else sums.problem
            try:
                problem = judge(self.path / name)
            except OSError as error:
                raise unreadable(self.path, error) from error
            if problem is not None:
                raise damaged(self.path, problem)


def find_checkpoint(path: Path) -> Saved:
    """The checkpoint at ``path``, or the latest in ``path`` or ``path/checkpoints``.

    ValueError if there is none, it is damaged, or a folder cannot be read.
    """
    folders = (path, path / "checkpoints")
    with reading(path):
        if (path / JOB).is_file() or _NAME.fullmatch(path.name):
            return open_checkpoint(path)
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


def last_good(paths: list[Path]) -> Saved:
    """The last checkpoint of ``paths`` (at least one) that passes ``Saved.check``.

    ValueError if all are damaged, or one cannot be read but may be intact.
    """
    first_error: DamagedError | None = None
    for path in reversed(paths):
        try:
            saved = open_checkpoint(path)
            saved.check()
        except DamagedError as error:
            first_error = first_error or error
        else:
            return saved
    assert first_error is not None, "no paths"
    raise damaged(first_error.path, first_error.why, START_ANEW)


def checkpoint_paths(folder: Path) -> list[Path]:
    """The checkpoints in a folder, by step; OSError if it cannot be read."""
    try:
        every = [*folder.iterdir()]  # glob finds nothing in a closed folder from Python 3.13 on
    except (FileNotFoundError, NotADirectoryError):
        return []
    named = {p: _NAME.fullmatch(p.name) for p in every}
    return sorted((p for p, match in named.items() if match), key=lambda p: int(p.name[5:]))


def is_checkpoint_of(path: str, folder: str) -> bool:
    """Whether ``path`` names a checkpoint, existing or not, in ``folder`` or its checkpoints."""
    parents = (Path(folder).resolve(), (Path(folder) / "checkpoints").resolve())
    return _NAME.fullmatch(Path(path).name) is not None and Path(path).parent.resolve() in parents


def open_checkpoint(path: Path) -> Saved:
    """Open a checkpoint by its ``job.json`` and ``checksums.json``.

    ValueError if it is damaged, cannot be read, or is of another version.
    """
    manifest = _read_manifest(path)
    job, models = _read_job(path, manifest)
    named = _NAME.fullmatch(path.name)
    if named and int(named[1]) != job["step"]:
        raise damaged(path, f"it is of step {job['step']} and of step {int(named[1])}")
    kept = {role: model for role, model in models.items() if not model.get("is_frozen")}
    frozen = {role: model for role, model in models.items() if model.get("is_frozen")}
    return Saved(path, job["step"], kept, job, manifest, frozen)


def _read_manifest(path: Path) -> Manifest:
    try:
        text = (path / CHECKSUMS).read_bytes()
    except OSError as error:
        raise not_read(path, error, CHECKSUMS) from error
    try:
        return from_plain(Manifest, unsealed(text), CHECKSUMS)
    except ValueError as error:
        raise damaged(path, _why(CHECKSUMS, error)) from error


def _read_job(path: Path, manifest: Manifest) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """The values of ``job.json`` and of its models, defaults filled in."""
    text = _read(path, JOB, manifest)
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise damaged(path, f"{JOB} is not a complete JSON file") from error
    if not isinstance(values, dict):
        raise damaged(path, f"{JOB} is not a JSON object")
    try:
        known = from_plain(_Job, values, JOB, is_open=True)
        models = {
            role: vars(from_plain(_SavedModel, entry, f"{JOB}.models.{shown(role)}", is_open=True))
            for role, entry in known.models.items()
        }
        starts = {  # open: checkpoints before there was ``role`` are read
            role: from_plain(Start, entry, f"{JOB}.starts.{shown(role)}", is_open=True)
            for role, entry in known.starts.items()
        }
    except ValueError as error:
        raise unlike(path, _why(JOB, error)) from error
    if problem := _config_problem(known.config):
        raise unlike(path, f"{JOB}: {problem}")
    return {**values, **vars(known), "starts": starts}, models


def _config_problem(config: Mapping[str, Any], parent: Key | None = None) -> str | None:
    """A line if a section or text of a saved config, of any version, has another type."""
    keys = section_keys(JobConfig if parent is None else parent.type, parent)
    for name, key in keys.items():
        if name not in config or (config[name] is None and (key.optional or not key.is_section)):
            continue
        value = config[name]
        if key.is_section:
            if not isinstance(value, dict):
                return f"config.{key.name} is {shown(value)}, not a mapping"
            if problem := _config_problem(value, key):
                return problem
        elif key.type is str and not isinstance(value, str):
            return f"config.{key.name} is {shown(value)}, not a text"
    return None


def _read(path: Path, name: str, manifest: Manifest) -> bytes:
    """A small file of a checkpoint, verified."""
    try:
        data = (path / name).read_bytes()
    except OSError as error:
        raise not_read(path, error, name) from error
    if name not in manifest.files:
        raise damaged(path, f"{name} is not in {CHECKSUMS}")
    if not manifest.files[name].has(data):
        raise damaged(path, f"{name} has another checksum than when it was made")
    return data


def _why(file: str, error: ValueError) -> str:
    text = str(error).removesuffix(AGAIN)
    return text if text.startswith(file) else f"{file}: {text}"
