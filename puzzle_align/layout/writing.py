"""What a user is told where the disk does not take what a run writes."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from puzzle_align.layout.shown import shown

CURE = "free space or mend the disk there, and run the same command again"


@contextmanager
def writing(path: Path, *, key: str | None = None, cure: str = CURE) -> Iterator[None]:
    """Write ``path``, which the config's ``key`` leads to, or what lies in it.

    Raises:
        ValueError: one line that names it, for an OSError inside: a full or read-only disk, a
            folder that was deleted.
    """
    try:
        yield
    except OSError as error:
        named = str(path) if key is None else f"{key}: {path}"
        why = shown(error.strerror or str(error))
        raise ValueError(f"{named} cannot be written ({why}): {cure}") from error
