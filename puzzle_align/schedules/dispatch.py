"""List scheduling: a free rank takes the most urgent action that is ready.

An action's urgency is the length of the longest chain of actions that starts with it. Unlike in
1F1B, a rank runs forwards ahead as long as there is memory for their activations, and so has other
work when an input is late.

Invariants (the tests assert them):
- each model's forwards, and its backwards, run in the order of the microbatches, on all ranks;
- no rank holds more live activations than its limit.
"""

import heapq
from collections import deque
from collections.abc import Iterable, Mapping, Sequence

from puzzle_align.schedules.actions import Action, Kind
from puzzle_align.schedules.costs import Costs
from puzzle_align.schedules.dependencies import Dependencies, Event
from puzzle_align.schedules.timing import in_one_order

_PATIENCE = 0.5  # longest wait for a more urgent action, as a share of the ready action's time


def dispatch(
    lists: Sequence[Sequence[Action]],
    graph: Dependencies,
    costs: Costs,
    limits: Sequence[float],
) -> list[list[Action]] | None:
    """Reorder the actions of every pipeline rank.

    Args:
        lists: compute actions that do not deadlock, of models with one chunk per rank.
        graph: dependencies of all models.
        limits: most live activations of every rank, in the unit of ``costs``.

    Returns:
        The lists; None if they deadlock because ranks at their limits wait for each other.
    """
    order = in_one_order(lists, graph)
    assert order is not None, "the lists deadlock"
    urgency = _urgency(order, graph, costs)
    waiting = _waiting(order, graph)
    ranks = [_Rank(rank, state, graph, costs, limits[rank]) for rank, state in enumerate(lists)]
    ends: dict[Event, float] = {}  # end times of all actions that have begun
    wakes = [(0.0, rank) for rank in range(len(lists))]  # a heap of (time, rank to look at)
    while wakes:
        now, rank = heapq.heappop(wakes)
        state = ranks[rank]
        action = state.pick(now, ends, urgency) if now >= state.free else None
        if action is None:
            continue
        state.take(action, now)
        event = graph.event(action, rank)
        ends[event] = state.free
        for other in {rank, *waiting.get(event, ())}:
            heapq.heappush(wakes, (state.free, other))
    if any(state.has_left for state in ranks):
        return None
    return [state.taken for state in ranks]


_Urgency = Mapping[Event, tuple[float, int, str]]  # the smallest is the most urgent


class _Rank:
    """State of one rank: the actions taken and those left."""

    def __init__(
        self,
        rank: int,
        actions: Sequence[Action],
        graph: Dependencies,
        costs: Costs,
        limit: float,
    ) -> None:
        self.taken: list[Action] = []
        self.free = 0.0  # end of the action taken last
        self._rank = rank
        self._graph = graph
        self._costs = costs
        self._limit = limit
        self._live = 0.0
        self._left: dict[tuple[str, Kind], deque[Action]] = {}  # in order of microbatches
        for action in actions:
            self._left.setdefault((action.model, action.kind), deque()).append(action)

    @property
    def has_left(self) -> bool:
        return any(self._left.values())

    def pick(self, now: float, ends: Mapping[Event, float], urgency: _Urgency) -> Action | None:
        """The action to begin; None to wait until an action is ready or its memory is free."""
        ready, coming = [], []
        for queue in self._left.values():
            if not queue:
                continue
            action = queue[0]
            inputs = self._graph.of(action, self._rank)
            kept = self._graph.kept(action, self._rank, self._costs)
            if self._live + max(kept, 0.0) <= self._limit and all(e in ends for e in inputs):
                at = max((ends[event] for event in inputs), default=0.0)
                key = urgency[self._graph.event(action, self._rank)]
                (ready if at <= now else coming).append((key, at, action))
        if not ready:
            return None
        key, _, action = min(ready, key=lambda choice: choice[0])
        until = now + _PATIENCE * self._time(action)
        return None if any(k < key and at < until for k, at, _ in coming) else action

    def take(self, action: Action, now: float) -> None:
        """Run the first remaining action of its kind."""
        self._left[action.model, action.kind].popleft()
        self._live += self._graph.kept(action, self._rank, self._costs)
        self.free = now + self._time(action)
        self.taken.append(action)

    def _time(self, action: Action) -> float:
        return self._costs[action.model].of(action, self._rank, self._graph.num_ranks)


def _urgency(
    order: Sequence[tuple[Action, int]], graph: Dependencies, costs: Costs
) -> dict[Event, tuple[float, int, str]]:
    behind: dict[Event, float] = {}  # time of the longest chain of actions that waits for an event
    urgency = {}
    for action, rank in reversed(order):
        event = graph.event(action, rank)
        time = costs[action.model].of(action, rank, graph.num_ranks)
        chain = time + behind.get(event, 0.0)
        for before in graph.of(action, rank):
            behind[before] = max(behind.get(before, 0.0), chain)
        urgency[event] = (-chain, action.microbatch, action.model)
    return urgency


def _waiting(order: Iterable[tuple[Action, int]], graph: Dependencies) -> dict[Event, set[int]]:
    """Ranks that wait for each event."""
    waiting: dict[Event, set[int]] = {}
    for action, rank in order:
        for before in graph.of(action, rank):
            waiting.setdefault(before, set()).add(rank)
    return waiting
