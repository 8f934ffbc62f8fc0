"""Words for error messages: foreign values on one short line, disk errors, ended processes."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

SHOWN = 80  # characters
_PATH = 400  # of a path, which is of no use cut short
MEND_DISK = "free space or mend the disk there, and run the same command again"


def shown(value: object, most: int = SHOWN) -> str:
    """``value`` on one line: a text as it is, anything else by its ``repr``, cut short.

    ``most`` is in characters.
    """
    if isinstance(value, str):
        return _cut(value, most)
    try:
        return _cut(repr(value), most)
    except (RecursionError, ValueError):  # nested too deep; an int of thousands of digits
        return f"a {type(value).__name__}"


def quoted(value: object) -> str:
    """``shown``, a text, which may look like a number, in quotes."""
    return f"'{shown(value)}'" if isinstance(value, str) else shown(value)


def shown_path(path: str | Path) -> str:
    """A path that a user gave, which may be anything, on one line."""
    return _cut(str(path), _PATH)


def _cut(text: str, most: int) -> str:
    text = " ".join(text[: 4 * most].split())  # so that what is absurdly long costs nothing
    text = "".join(c if c.isprintable() else repr(c)[1:-1] for c in text[: 2 * most])
    return text if len(text) <= most else f"{text[: most - 3]}..."


@contextmanager
def reading(path: Path, *, key: str | None = None) -> Iterator[None]:
    """Say which path could not be read, and the cure, where the block raises an OSError.

    A disk, a network or permissions are then at fault: the files may be as good as they were.

    Args:
        path: what the block reads: a file, or a folder of files.
        key: the config's key that holds the path.

    Raises:
        ValueError: one line, for an OSError inside.
    """
    try:
        yield
    except OSError as error:
        place = str(path) if key is None else f"{key}: {path}"
        why = f"{Path(error.filename or path).name}: {shown(error.strerror or str(error))}"
        raise ValueError(
            f"{place} cannot be read ({why}), and is left as it is: mend the disk or its"
            " permissions there, and run the same command again"
        ) from error


@contextmanager
def writing(path: Path, *, key: str | None = None, cure: str = MEND_DISK) -> Iterator[None]:
    """Say which path could not be written, and the cure, where the block raises an OSError.

    The disk is then full or read-only, or the folder was deleted.

    Args:
        path: what the block writes: a file, or a folder of files.
        key: the config's key that holds the path.
        cure: what the user is advised to do.

    Raises:
        ValueError: one line, for an OSError inside.
    """
    try:
        yield
    except OSError as error:
        place = str(path) if key is None else f"{key}: {path}"
        why = shown(error.strerror or str(error))
        raise ValueError(f"{place} cannot be written ({why}): {cure}") from error


def ending(code: int) -> str:
    """A process's end in words: ``ended with code 3`` or ``was ended by SIGKILL``.

    Args:
        code: as ``subprocess`` has it; below 0 the number of a signal.
    """
    if code >= 0:
        return f"ended with code {code}"
    try:
        return f"was ended by {signal.Signals(-code).name}"
    except ValueError:  # real-time signals have numbers alone
        return f"was ended by signal {-code}"
