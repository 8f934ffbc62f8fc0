"""What a user is told where the disk does not give what a run reads."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from puzzle_align.layout.shown import shown


@contextmanager
def reading(path: Path, *, key: str | None = None) -> Iterator[None]:
    """Read ``path``, which the config's ``key`` leads to, or what lies in it.

    Raises:
        ValueError: one line that names it, for an OSError inside: a disk, a network or permissions
            are at fault, and what is there may be as good as it was.
    """
    try:
        yield
    except OSError as error:
        named = str(path) if key is None else f"{key}: {path}"
        why = f"{Path(error.filename or path).name}: {shown(error.strerror or str(error))}"
        raise ValueError(
            f"{named} cannot be read ({why}), and is left as it is: mend the disk or its"
            " permissions there, and run the same command again"
        ) from error
