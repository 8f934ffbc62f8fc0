"""What a user is told where the disk does not take what a run writes."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from puzzle_align.layout.shown import shown


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Write ``path``, or what lies in it.

    Raises:
        ValueError: one line that names it, for an OSError inside: a full or read-only disk, a
            folder that was deleted.
    """
    try:
        yield
    except OSError as error:
        raise ValueError(
            f"{path} cannot be written ({shown(error.strerror or str(error))}): free space or mend"
            " the disk there, and run the same command again"
        ) from error
