"""Whether files are the ones that this process has read before, told without reading them again."""

import os
import time
from collections.abc import Iterable
from pathlib import Path

Stamp = tuple[tuple[str, int, int, int, int, int], ...]

_FRESH_S = 2.0  # two changes within it may have the same times, on some file systems


def stamp(files: Iterable[Path]) -> Stamp | None:
    """What changes with every change of the files; None where one may go unnoticed.

    The time of the last change of state (ctime) is one that nobody can set. Take the stamp before
    the files are read. OSError where one is not there.
    """
    now, found = time.time(), []
    for file in files:
        state = os.stat(file)
        if abs(now - state.st_ctime) < _FRESH_S:
            return None
        times = (state.st_mtime_ns, state.st_ctime_ns)
        found.append((str(file), state.st_dev, state.st_ino, state.st_size, *times))
    return tuple(found)
