"""A foreign value in an error's line: one line, and never a long one."""

from pathlib import Path

SHOWN = 80  # characters
_PATH = 400  # of a path, which is of no use cut short


def shown(value: object, most: int = SHOWN) -> str:
    """``value`` as an error shows it: a text as it is, anything else by its ``repr``, cut short.

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
    """A path that a user gave, which may be anything."""
    return _cut(str(path), _PATH)


def _cut(text: str, most: int) -> str:
    text = " ".join(text[: 4 * most].split())  # so that what is absurdly long costs nothing
    text = "".join(c if c.isprintable() else repr(c)[1:-1] for c in text[: 2 * most])
    return text if len(text) <= most else f"{text[: most - 3]}..."
