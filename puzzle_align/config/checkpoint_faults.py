"""What is wrong with a checkpoint: it is damaged, or the machine does not let it be read."""

from pathlib import Path

from puzzle_align.files.checksums import missing

_MOVE = "move that directory away, and the one before it is taken"


class DamagedError(ValueError):
    """A checkpoint is not as it was saved: ``path``, ``why`` and ``cure`` in some words."""

    path: Path
    why: str
    cure: str

    @property
    def has_own_cure(self) -> bool:
        """Whether there is another cure than the one for all damage."""
        return self.cure != _MOVE


def damaged(path: Path, why: str, cure: str = _MOVE) -> DamagedError:
    """What to raise where a checkpoint cannot be read."""
    error = DamagedError(f"checkpoint {path} is damaged or incomplete ({why}): {cure}")
    error.path, error.why, error.cure = path, why, cure
    return error


class OtherVersionError(ValueError):
    """A checkpoint is as it was saved, and that is not what this version saves."""


def unlike(path: Path, why: str, *, sealed: bool) -> ValueError:
    """What to raise where a checkpoint holds something else than this version would save.

    Args:
        sealed: whether that is known to be what was saved; else it is damage.
    """
    if not sealed:
        return damaged(path, why)
    return OtherVersionError(
        f"checkpoint {path} is not what this version saves ({why}), and is left as it is: go on"
        " with the version that saved it, or move that directory away"
    )


class UnreadableError(ValueError):
    """The machine does not let a checkpoint be read, which may be as good as it was."""


def unreadable(path: Path, error: BaseException) -> UnreadableError:
    """What to raise where memory, a disk or a network fails: nothing is done to the checkpoint."""
    why = cause(error)
    if isinstance(error, OSError):
        why = f"{Path(error.filename or path).name}: {error.strerror or why}"
    return UnreadableError(
        f"checkpoint {path} cannot be read now ({why}), and is left as it is: see to the machine's"
        " memory, disk or network, and run the same command again"
    )


def not_read(path: Path, error: OSError, name: str | None = None) -> ValueError:
    """What to raise where a file of a checkpoint could not be read: damage only if it is missing.

    Args:
        name: the file's; None: as the error has it.
    """
    try:
        return damaged(path, missing(path / (name or Path(error.filename or path).name), error))
    except OSError as other:
        return unreadable(path, other)


def cause(error: BaseException) -> str:
    """What went wrong, in one short line."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:200]}"
