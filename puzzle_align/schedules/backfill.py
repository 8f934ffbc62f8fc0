"""Backfill: put one model's actions into the idle times of a timeline.

The timeline's actions keep their order and, with ``tolerance`` 0 or less, their times: each new
action fits into a gap in which its rank would have waited, or comes after all of them.
"""

from collections.abc import Sequence

from puzzle_align.schedules.actions import Action
from puzzle_align.schedules.costs import Costs
from puzzle_align.schedules.dependencies import Dependencies, Event
from puzzle_align.schedules.timeline import Timeline
from puzzle_align.schedules.timing import walk


class _Rank:
    """State of one rank. Gap g ends where action g of the timeline (a fixed action) starts."""

    def __init__(self, timeline: Timeline, rank: int, graph: Dependencies, costs: Costs) -> None:
        self.spans = timeline.ranks[rank]
        self.gap = 0
        self.free = 0.0  # end of the action inserted last
        self.live = 0.0  # activations of the inserted actions
        self.gaps: list[list[Action]] = [[] for _ in range(len(self.spans) + 1)]
        # Most activations that the fixed actions hold from gap g on.
        self.held = [0.0]
        for span in self.spans:
            self.held.append(self.held[-1] + graph.kept(span.action, rank, costs))
        for gap in reversed(range(len(self.spans))):
            self.held[gap] = max(self.held[gap], self.held[gap + 1])

    def stand_behind(self, models: set[str]) -> None:
        """Allow insertions only after the last fixed action of these models."""
        for number, span in enumerate(self.spans, start=1):
            if span.action.model in models:
                self.gap = number

    def find(self, ready: float, time: float, room: float, slack: float) -> float | None:
        """Start in the first gap of ``time - slack`` with memory ``room``; None if none has it."""
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
    graph: Dependencies,
    costs: Costs,
    *,
    limits: Sequence[float],
    tolerance: float = 0.0,
    deadline: float | None = None,
) -> list[list[Action]] | None:
    """The timeline's actions and those of ``lists``, for every pipeline rank.

    Args:
        timeline: of actions that depend on none of ``lists``.
        lists: one model's compute actions; they come after its actions in the timeline.
        graph: dependencies of all models.
        limits: most live activations of every rank, in the unit of ``costs``.
        tolerance: share of an action's time by which it may outlast its gap and delay the next
            action; negative: share by which its gap, and the time to the deadline, must be longer.
        deadline: leave out actions that would end later; None: insert all of them.

    Returns:
        The lists; None if a rank cannot hold the activations.
    """
    num_ranks = len(lists)
    ranks = [_Rank(timeline, rank, graph, costs) for rank in range(num_ranks)]

    for state, actions in zip(ranks, lists, strict=True):
        state.stand_behind({action.model for action in actions})

    def put_in(action: Action, rank: int, ready: float) -> tuple[tuple[Event, float]] | None:
        state, kept = ranks[rank], graph.kept(action, rank, costs)
        time = costs[action.model].of(action, rank, num_ranks)
        room = limits[rank] - state.live - max(kept, 0.0)
        slack = tolerance * time
        start = state.find(ready, time, room, slack)
        if start is None or (deadline is not None and start + time - slack > deadline):
            return None
        state.free = start + time
        state.live += kept
        state.gaps[state.gap].append(action)
        return ((graph.event(action, rank), state.free),)

    done = {
        graph.event(span.action, rank): span.end
        for rank, spans in enumerate(timeline.ranks)
        for span in spans
    }
    is_complete = walk(lists, graph.of, put_in, done)
    if deadline is None and not is_complete:
        return None
    return [_merged(rank) for rank in ranks]


def _merged(rank: _Rank) -> list[Action]:
    merged = list(rank.gaps[0])
    for span, actions in zip(rank.spans, rank.gaps[1:], strict=True):
        merged += [span.action, *actions]
    return merged
