"""Every config key as help text."""

import textwrap
from typing import Any

from puzzle_align.config.job import JobConfig
from puzzle_align.config.schema import Key, all_keys, is_among
from puzzle_align.files.typed import kind_of

WIDTH = 96
INDENT = " " * 6


def describe_keys(only: tuple[str, ...] = ()) -> str:
    """Describe config keys: name, default, unit or choices, one line of doc each (wrapped).

    ``only`` limits them to these keys and sections; empty: all keys, with the stages that read them
    unless all do (for a section, in the section's line).
    """
    lines = ["config keys, with their defaults:"]
    stages: dict[str, tuple[str, ...]] = {}  # by key described so far
    for key in all_keys(JobConfig):
        if only and not is_among(key.name, only):
            continue
        stages[key.name] = () if only else key.stages
        outer = stages.get(key.name.rpartition(".")[0], ())
        shown = stages[key.name] if stages[key.name] != outer else ()
        lines += ["", *_section_lines(key, shown)] if key.is_section else _value_lines(key, shown)
    return "\n".join(lines)


def _section_lines(key: Key, stages: tuple[str, ...]) -> list[str]:
    read = f" ({_stages(stages)})" if stages else ""
    return textwrap.wrap(
        f"{key.name}: {key.doc}{read}", WIDTH, initial_indent="  ", subsequent_indent=INDENT
    )


def _value_lines(key: Key, stages: tuple[str, ...]) -> list[str]:
    kind = " | ".join(key.choices) or key.unit or kind_of(key.hint).words
    read = f"; {_stages(stages)}" if stages else ""
    return [
        f"  {key.name}={_written(key.default)}",
        *textwrap.wrap(
            f"{key.doc} ({kind}{read})", WIDTH, initial_indent=INDENT, subsequent_indent=INDENT
        ),
    ]


def _stages(stages: tuple[str, ...]) -> str:
    return f"stage {' or '.join(stages)}"


def _written(value: Any) -> str:
    """Format a default as YAML."""
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)
