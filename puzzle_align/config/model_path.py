"""``<role>.model.path``: a Hugging Face directory, or a model in a finished checkpoint.

A folder of checkpoints stands for its latest one. The latest may change at any moment, so
``config.resolution`` looks it up once for a job.
"""

from dataclasses import dataclass, replace
from pathlib import Path

from puzzle_align.config.saved import Saved, Start, find_checkpoint
from puzzle_align.files.messages import shown_path
from puzzle_align.layout.hf_config import from_hf_config, read_hf_config
from puzzle_align.layout.model import ModelSpec

# The saved roles that a role can start from: the first in the checkpoint, else its only model.
_PREFERRED = {
    "actor": ("actor",),
    "reference": ("reference", "actor"),
    "reward": ("reward",),
    "critic": ("critic", "reward"),
}


@dataclass(frozen=True)
class NamedModel:
    """The model that a path names; ``saved`` None: a Hugging Face directory."""

    path: Path
    spec: ModelSpec
    saved: Saved | None = None
    role: str = ""  # of the model in the checkpoint

    @property
    def base_path(self) -> str | None:
        """The path; of a checkpoint of adapters, that of their base, None if it is random."""
        if self.saved is None or self.spec.lora is None:
            return str(self.path)
        start: Start = self.saved.job["starts"][self.role]
        return start.path

    def __str__(self) -> str:
        return str(self.path) if self.saved is None else f"the {self.role} of {self.path}"


def find_saved(path: str | Path, key: str) -> Saved | None:
    """The checkpoint at a path, the latest of several; None for a Hugging Face directory.

    If the path is neither, a one-line ValueError that begins with ``key``.
    """
    path, cure = Path(path), "give a Hugging Face model's, or a checkpoint's"
    try:
        is_there, is_hf = path.exists(), (path / "config.json").is_file()
    except OSError as error:
        why = error.strerror
        raise ValueError(f"{key}: {shown_path(path)}: {why}; {cure}") from error
    if not is_there:
        raise ValueError(f"{key}: {shown_path(path)}: no such directory; {cure}")
    if is_hf:
        return None
    if (path / "adapter_config.json").is_file():
        raise ValueError(
            f"{key}: {shown_path(path)} holds adapters (adapter_config.json) without their model; "
            "train from them by ROLE.lora.path beside the model's path; for all else, merge them "
            "(puzzle-align convert --merge)"
        )
    try:
        return find_checkpoint(path)
    except ValueError as error:
        raise ValueError(
            f"{key}: no Hugging Face model (config.json) there, and as a checkpoint: {error}"
        ) from error


class ModelPaths:
    """Models by path; each path is opened once."""

    def __init__(self, *opened: NamedModel) -> None:
        """``opened``: models that are open already."""
        self._opened: dict[str, NamedModel | Saved] = {str(model.path): model for model in opened}

    def model(self, path: str, key: str) -> NamedModel:
        """The model that a path names; reads no tensors.

        Args:
            key: dotted name of the model with this path, such as ``critic.model``.

        Raises:
            ValueError: one line, if the path holds no model, several and none for the role, or one
                that is not supported.
        """
        if path not in self._opened:
            self._opened[path] = _open(path, key)
        opened = self._opened[path]
        return _of_checkpoint(opened, key) if isinstance(opened, Saved) else opened


def _open(path: str, key: str) -> NamedModel | Saved:
    saved = find_saved(path, f"{key}.path")
    if saved is not None:
        return saved
    try:
        config = read_hf_config(path)
    except ValueError as error:
        raise ValueError(f"{key}.path: {error}") from error
    if (Path(path) / "adapter_config.json").exists():
        raise ValueError(
            f"{key}.path: {path} has an adapter beside the model (adapter_config.json), which is"
            " not added to it: move it to another directory, and give that as lora.path"
        )
    return NamedModel(Path(path), from_hf_config(config, f"{path}/config.json"))


def _of_checkpoint(saved: Saved, key: str) -> NamedModel:
    """The checkpoint's model for the role in ``key``."""
    wanted = key.partition(".")[0]
    role = next((role for role in _PREFERRED[wanted] if role in saved.models), None)
    if role is None and len(saved.models) == 1:
        (role,) = saved.models
    if role is None:
        raise ValueError(
            f"{key}.path: {saved.path} holds {' and '.join(saved.models)}, and no {wanted}: give "
            "what 'puzzle-align convert --role' makes of one of them"
        )
    return checkpoint_model(saved, role)


def checkpoint_model(saved: Saved, role: str) -> NamedModel:
    """A role's model in a checkpoint; ValueError, one line, if it is missing or not supported."""
    about = saved.metadata(role)
    spec = from_hf_config(about["model"], f"{saved.path}/job.json")
    return NamedModel(saved.path, replace(spec, lora=about["lora"]), saved, role)
