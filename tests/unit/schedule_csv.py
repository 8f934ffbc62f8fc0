"""Schedules as CSV: one line per rank, actions in order, as ``actor:F3.0``."""

import re

from puzzle_align.schedules.actions import Action, Kind

_ACTION = re.compile(r"([A-Za-z_][\w-]*):(F|B|RF|SF|RB|SB)(\d+)\.(\d+)", re.ASCII)


def parse_action(text: str) -> Action:
    match = _ACTION.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"{text!r} is not an action; write model:kind, as in 'actor:F3.0'")
    model, kind, microbatch, chunk = match.groups()
    return Action(model, Kind(kind), int(microbatch), int(chunk))


def to_csv(lists: list[list[Action]]) -> str:
    return "".join(",".join(map(str, actions)) + "\n" for actions in lists)


def from_csv(text: str) -> list[list[Action]]:
    """An empty line is a rank without actions."""
    cells = (line.split(",") if line.strip() else [] for line in text.splitlines())
    return [list(map(parse_action, row)) for row in cells]
