"""The line with which a call is refused, and folders that refuse this process."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from puzzle_align.cli.main import is_mistake


def refusal(call: Callable[[], object], kind: type[ValueError] = ValueError) -> str:
    """The line of the ValueError (or of its ``kind``) that a call raises, as users would see it."""
    with pytest.raises(kind) as raised:
        call()
    assert is_mistake(raised.value), "it would be shown with its traceback"
    line = str(raised.value)
    assert len(line.splitlines()) == 1, line
    return line


@contextmanager
def closed(folder: Path, mode: int = 0) -> Iterator[None]:
    """Let this process, even if it is root's, do with a folder as others do: by default nothing."""
    folder.chmod(mode)
    is_root = os.geteuid() == 0
    if is_root:
        os.setresuid(65534, 65534, 0)
    try:
        yield
    finally:
        if is_root:
            os.setresuid(0, 0, 0)
        folder.chmod(0o700)
