"""Output of commands, on the screen and in files."""

import os
import sys
from collections.abc import Callable
from pathlib import Path

from puzzle_align.files.messages import writing


def say(*lines: str) -> None:
    """Print lines to stdout."""
    with writing(Path("stdout")):
        sys.stdout.writelines(f"{line}\n" for line in lines)
        sys.stdout.flush()


def check_writable(flag: str, path: Path) -> None:
    """Raise a one-line ValueError if a flag's file would be in no folder that can be written."""
    folder = path.absolute().parent  # maybe in a closed one, in which Path.is_dir raises
    if not os.path.isdir(folder) or not os.access(folder, os.W_OK | os.X_OK):
        raise ValueError(
            f"{flag} {path}: {folder} is not a writable folder; make it, or name another"
        )


def save_file(flag: str, path: Path, save: Callable[[Path], object]) -> None:
    """Write a flag's file; ValueError naming flag and path if that fails."""
    with writing(path, key=flag, cure="name another file"):
        save(path)
