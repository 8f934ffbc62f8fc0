"""Parts of error messages: foreign values on one short line, disk errors, ended processes."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

SHOWN = 80  # characters
_PATH = 400  # characters of a path, which is useless when cut short
MEND_DISK = "free space or mend the disk there, and run the same command again"


def shown(value: object, most: int = SHOWN) -> str:
    """``value`` on one line of at most ``most`` characters: a text itself, or a ``repr``."""
    if isinstance(value, str):
        return _cut(value, most)
    try:
        return _cut(repr(value), most)
    except (RecursionError, ValueError):  # nested too deep; an int of thousands of digits
        return f"a {type(value).__name__}"


def quoted(value: object) -> str:
    """``shown``, with texts in quotes, since a text may look like a number."""
    return f"'{shown(value)}'" if isinstance(value, str) else shown(value)


def shown_path(path: str | Path) -> str:
    """A path from a user on one line; it may hold any characters."""
    return _cut(str(path), _PATH)


def _cut(text: str, most: int) -> str:
    text = " ".join(text[: 4 * most].split())  # a very long text costs nothing
    text = "".join(c if c.isprintable() else repr(c)[1:-1] for c in text[: 2 * most])
    return text if len(text) <= most else f"{text[: most - 3]}..."


@contextmanager
def reading(path: Path, *, key: str | None = None) -> Iterator[None]:
    """Turn an OSError in the block into a one-line ValueError with the path and the cure.

    A disk, a network or permissions are at fault: the files may be intact.

    Args:
        path: the file that the block reads, or its folder.
        key: the config's key that holds the path.
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
    """Turn an OSError in the block into a one-line ValueError with the path and the cure.

    The disk is full or read-only, or the folder was deleted.

    Args:
        path: the file that the block writes, or its folder.
        key: the config's key, or the option, that holds the path.
        cure: advice for the user.
    """
    try:
        yield
    except OSError as error:
        place = str(path) if key is None else f"{key}: {path}"
        why = shown(error.strerror or str(error))
        raise ValueError(f"{place} cannot be written ({why}): {cure}") from error


def ending(code: int) -> str:
    """A process's exit code in words: ``ended with code 3`` or ``was ended by SIGKILL``.

    Below 0 it is the number of a signal, as in ``subprocess``.
    """
    if code >= 0:
        return f"ended with code {code}"
    try:
        return f"was ended by {signal.Signals(-code).name}"
    except ValueError:  # real-time signals have no names
        return f"was ended by signal {-code}"
