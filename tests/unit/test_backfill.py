"""Backfill by hand: on one rank, one model's actions in the idle times of another's."""

from collections.abc import Sequence

import pytest

from puzzle_align.schedules.actions import Program
from puzzle_align.schedules.backfill import backfill
from puzzle_align.schedules.costs import Costs
from puzzle_align.schedules.dependencies import Dependencies
from puzzle_align.schedules.timeline import Span, Timeline
from tests.costs import uniform
from tests.unit.schedule_csv import parse_action

COSTS: Costs = {"a": uniform(1, 1, 2), "b": uniform(1, 1, 1)}
# Its microbatches keep an activation each, from 0 to 5 and from 2 to 7; the rank idles before 2.
FIXED = (("a:F0.0", 0, 1), ("a:F1.0", 2, 3), ("a:B0.0", 3, 5), ("a:B1.0", 5, 7))


def filled(
    fixed: Sequence[tuple[str, float, float]],
    actions: Sequence[str],
    *,
    limit: float,
    trained: bool = True,
    tolerance: float = 0.0,
    deadline: float | None = None,
) -> list[str] | None:
    """The fixed actions of model a with those of model b, of two microbatches each."""
    graph = Dependencies([Program("a", 2), Program("b", 2, backward=trained)], 1)
    spans = tuple(Span(parse_action(text), start, end) for text, start, end in fixed)
    lists = backfill(
        Timeline((spans,)),
        [[parse_action(text) for text in actions]],
        graph,
        COSTS,
        limits=[limit],
        tolerance=tolerance,
        deadline=deadline,
    )
    return None if lists is None else [str(action).removesuffix(".0") for action in lists[0]]


def test_a_gap_is_used_only_with_room_for_what_is_kept_from_then_on() -> None:
    own = ["b:F0.0", "b:B0.0"]
    wide = filled(FIXED, own, limit=3)
    assert wide == ["a:F0", "b:F0", "a:F1", "a:B0", "a:B1", "b:B0"]
    # At 1 one activation is kept beside it, but from 2 on two are: it waits for the first to go.
    narrow = filled(FIXED, own, limit=2)
    assert narrow == ["a:F0", "a:F1", "a:B0", "a:B1", "b:F0", "b:B0"]


def test_inserted_actions_share_the_room() -> None:
    own = ["b:F0.0", "b:F1.0", "b:B0.0", "b:B1.0"]
    assert filled((), own, limit=2) == ["b:F0", "b:F1", "b:B0", "b:B1"]
    assert filled((), own, limit=1) is None
    in_turn = ["b:F0.0", "b:B0.0", "b:F1.0", "b:B1.0"]
    assert filled((), in_turn, limit=1) == ["b:F0", "b:B0", "b:F1", "b:B1"]


@pytest.mark.parametrize(
    ("deadline", "tolerance", "inserted"), [(8, 0.0, 2), (7.5, 0.0, 1), (7.5, 0.5, 2), (8, -0.1, 0)]
)
def test_what_would_end_after_the_deadline_is_left_out(
    deadline: float, tolerance: float, inserted: int
) -> None:
    """A gap from 1 to 2, and the time from 7 to the deadline; each forward takes 1."""
    made = filled(
        FIXED,
        ["b:F0.0", "b:F1.0"],
        limit=9,
        trained=False,
        tolerance=tolerance,
        deadline=deadline,
    )
    assert made is not None and sum(text.startswith("b") for text in made) == inserted
    assert [text for text in made if text.startswith("a")] == ["a:F0", "a:F1", "a:B0", "a:B1"]
