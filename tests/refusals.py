"""The line with which a call is refused."""

from collections.abc import Callable

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
