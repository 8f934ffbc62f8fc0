"""Every config key as help text."""

import textwrap
from collections.abc import Sequence
from typing import Any

from puzzle_align.config.job import JobConfig
from puzzle_align.config.load import TYPE_NAMES
from puzzle_align.config.schema import Key, all_keys

WIDTH = 96
INDENT = " " * 6


def describe_keys(only: Sequence[str] = ()) -> str:
    """Keys of a config: name, default, unit or choices, one line of doc each (wrapped).

    ``only``: these keys and what is in these sections; else all.
    """
    lines = ["config keys, with their defaults:"]
    for key in all_keys(JobConfig):
        if only and not is_among(key.name, only):
            continue
        lines += ["", *_section_lines(key)] if key.is_section else _value_lines(key)
    return "\n".join(lines)


def _section_lines(key: Key) -> list[str]:
    return textwrap.wrap(
        f"{key.name}: {key.doc}", WIDTH, initial_indent="  ", subsequent_indent=INDENT
    )


def is_among(name: str, keys: Sequence[str]) -> bool:
    """Whether a dotted name is one of the keys, or in one of the sections."""
    return any(name == key or name.startswith(f"{key}.") for key in keys)


def _value_lines(key: Key) -> list[str]:
    kind = " | ".join(key.choices) or key.unit or TYPE_NAMES[key.type]
    return [
        f"  {key.name}={_written(key.default)}",
        *textwrap.wrap(
            f"{key.doc} ({kind})", WIDTH, initial_indent=INDENT, subsequent_indent=INDENT
        ),
    ]


def _written(value: Any) -> str:
    """A default as one would write it in YAML."""
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)
