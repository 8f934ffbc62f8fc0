"""Puts one model's actions into the idle times of a timeline.

The timeline's actions keep their order and, with ``tolerance`` 0 or less, their times: whatever is
put in fits where its rank would have waited, or stands behind all of them.
"""

from collections.abc import Sequence

from puzzle_align.schedules.actions import Action
from puzzle_align.schedules.costs import Costs
from puzzle_align.schedules.dependencies import Dependencies, Event
from puzzle_align.schedules.timeline import Timeline
from puzzle_align.schedules.timing import walk


class _Rank:
    """One rank while actions are put in. Gap g ends where fixed action g starts."""

    def __init__(self, timeline: Timeline, rank: int, needs: Dependencies, costs: Costs) -> None:
        self.spans = timeline.ranks[rank]
        self.gap = 0
        self.free = 0.0  # end of the action put in last
        self.live = 0.0  # activations of those put in
        self.gaps: list[list[Action]] = [[] for _ in range(len(self.spans) + 1)]
        # Most activations the fixed actions hold from gap g on: each frees, or keeps, its own.
        self.held = [0.0] * (len(self.spans) + 1)
        live = 0.0
        for number, span in enumerate(self.spans):
            self.held[number] = live
            live += needs.kept(span.action, rank, costs)
        self.held[-1] = live
        for number in reversed(range(len(self.spans))):
            self.held[number] = max(self.held[number], self.held[number + 1])

    def stand_behind(self, models: set[str]) -> None:
        """Allow insertions only after the last fixed action of these models."""
        for number, span in enumerate(self.spans, start=1):
            if span.action.model in models:
                self.gap = number

    def find(self, ready: float, time: float, room: float, slack: float) -> float | None:
        """Start of the first gap of ``time - slack`` and with room; None if there never is room."""
        for gap in range(self.gap, len(self.spans) + 1):
            before = self.spans[gap - 1].end if gap else 0.0
            start = max(ready, self.free, before)
            fits = gap == len(self.spans) or start + time - slack <= self.spans[gap].start
            if fits and self.held[gap] <= room:
                self.gap = gap
                return start
        return None


def backfill(
    timeline: Timeline,
    lists: Sequence[Sequence[Action]],
    needs: Dependencies,
    costs: Costs,
    *,
    limits: Sequence[float],
    tolerance: float = 0.0,
    deadline: float | None = None,
) -> list[list[Action]] | None:
    """The timeline's actions with those of ``lists`` put in, for every pipeline rank.

    Args:
        timeline: of models that need nothing of what is put in.
        lists: one model's compute actions; they come behind those that the timeline has of it.
        needs: of all models.
        limits: live activations that every rank may hold, in the unit of ``costs``.
        tolerance: share of an action that may stick out of its gap and put off what follows;
            negative: that its gap, and the time to the deadline, must have to spare.
        deadline: leave out what would end later; None: put in everything.

    Returns:
        The lists; None if a rank cannot hold the activations.
    """
    num_ranks = len(lists)
    ranks = [_Rank(timeline, rank, needs, costs) for rank in range(num_ranks)]

    for state, actions in zip(ranks, lists, strict=True):
        state.stand_behind({action.model for action in actions})

    def put_in(action: Action, rank: int, ready: float) -> tuple[tuple[Event, float]] | None:
        state, kept = ranks[rank], needs.kept(action, rank, costs)
        time = costs[action.model].of(action, rank, num_ranks)
        room = limits[rank] - state.live - max(kept, 0.0)
        slack = tolerance * time
        start = state.find(ready, time, room, slack)
        if start is None or (deadline is not None and start + time - slack > deadline):
            return None
        state.free = start + time
        state.live += kept
        state.gaps[state.gap].append(action)
        return ((needs.event(action, rank), state.free),)

    done = {
        needs.event(span.action, rank): span.end
        for rank, spans in enumerate(timeline.ranks)
        for span in spans
    }
    is_complete = walk(lists, needs.of, put_in, done)
    if deadline is None and not is_complete:
        return None
    return [_merged(rank) for rank in ranks]


def _merged(rank: _Rank) -> list[Action]:
    merged = list(rank.gaps[0])
    for span, actions in zip(rank.spans, rank.gaps[1:], strict=True):
        merged += [span.action, *actions]
    return merged
