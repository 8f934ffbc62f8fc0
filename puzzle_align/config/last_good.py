"""The last good of several checkpoints: found, and named where a damaged one was asked for."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from puzzle_align.config.checkpoint_faults import (
    DamagedError,
    OtherVersionError,
    UnreadableError,
    damaged,
)
from puzzle_align.config.saved import Saved, checkpoint_paths, open_checkpoint


def find_good(paths: list[Path], *, whole: bool, verify: bool = True) -> Saved | None:
    """The last of the checkpoints with which nothing is wrong, or None.

    Args:
        whole: as of ``Saved.problem``.
        verify: whether one without checksums is none of them.

    Raises:
        ValueError: if one cannot be read, and may be good.
    """
    for path in reversed(paths):
        try:
            saved = open_checkpoint(path)
        except DamagedError:
            continue
        is_older = saved.manifest is None and not verify
        if is_older or saved.problem(whole=whole) is None:
            return saved
    return None


def instead_of(
    error: DamagedError, take: str, none: str, *, whole: bool, verify: bool
) -> DamagedError:
    """The error, with the last good checkpoint before that one as its cure.

    Args:
        take: how it is taken, with ``{path}`` and ``{name}`` for its own.
        none: what to do where there is none.
        whole: as of ``find_good``, like ``verify``.
    """
    paths = checkpoint_paths(error.path.parent)
    older = paths[: paths.index(error.path)] if error.path in paths else paths
    try:
        good = find_good(older, whole=whole, verify=verify)
    except (OtherVersionError, UnreadableError):
        good = None
    cure = f"no checkpoint before it is known to be good: {none}"
    if good is not None:
        cure = take.format(path=good.path, name=good.path.name)
    if error.has_own_cure:
        cure = f"{error.cure}; {cure}"
    return damaged(error.path, error.why, cure)


def to_name_instead(error: DamagedError, *, whole: bool, verify: bool) -> DamagedError:
    """As ``instead_of``, where a user names checkpoints by their paths."""
    sure = "" if whole else ", as far as sizes and small files tell"
    take = f"{{path}} is the last good one before it{sure}: name that"
    return instead_of(error, take, "name another", whole=whole, verify=verify)


@contextmanager
def naming_last_good(*, whole: bool = False, verify: bool = True) -> Iterator[None]:
    """Name, where the block finds a checkpoint damaged, the one to take in its place.

    Args:
        whole: whether to read all of that one, which takes as long as to load it.
        verify: whether one without checksums is none.
    """
    try:
        yield
    except DamagedError as error:
        raise to_name_instead(error, whole=whole, verify=verify) from error
