"""When the actions of given lists happen: the runner of all that is timed before it is executed.

``walk`` runs lists by the events they bring about and wait for; ``timeline_of`` is the schedulers'
measure of what they propose: compute actions only, an input is there as soon as it is made.
``planning.simulate`` walks lowered lists, with transfers.
"""

from collections import deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import TypeVar

from puzzle_align.schedules.actions import Action
from puzzle_align.schedules.costs import Costs
from puzzle_align.schedules.dependencies import Dependencies, Event
from puzzle_align.schedules.timeline import Span, Timeline

E = TypeVar("E", bound=Hashable)


def walk(
    lists: Sequence[Sequence[Action]],
    inputs_of: Callable[[Action, int], Iterable[E]],
    do: Callable[[Action, int, float], Iterable[tuple[E, float]] | None],
    done: dict[E, float],
) -> bool:
    """Do every rank's actions in order, each when what it waits for has come about.

    A rank stops at an action whose inputs never come about.

    Args:
        lists: of every pipeline rank.
        inputs_of: ``(action, rank)`` -> the events that an action waits for. Asked when the rank's
            actions before it are done.
        do: ``(action, rank, time)`` -> the events that an action brings about, each with its time;
            None to stop the rank before it. Its inputs have all come about at ``time``.
        done: when events come about; grows as actions are done.

    Returns:
        Whether every rank is at its list's end.
    """
    at = [0] * len(lists)
    waiting: dict[E, list[int]] = {}  # the ranks that cannot go on before an event
    runnable = deque(range(len(lists)))
    while runnable:
        rank = runnable.popleft()
        while at[rank] < len(lists[rank]):
            action = lists[rank][at[rank]]
            ready, missing = 0.0, None
            for event in inputs_of(action, rank):
                if event not in done:
                    missing = event
                    break
                ready = max(ready, done[event])
            if missing is not None:
                waiting.setdefault(missing, []).append(rank)
                break
            events = do(action, rank, ready)
            if events is None:
                break
            at[rank] += 1
            for event, time in events:
                done[event] = time
                runnable.extend(waiting.pop(event, ()))
    return at == [len(actions) for actions in lists]


def timeline_of(
    lists: Sequence[Sequence[Action]], needs: Dependencies, costs: Costs
) -> Timeline | None:
    """The timeline of compute lists; None if they deadlock."""
    spans: list[list[Span]] = [[] for _ in lists]

    def do(action: Action, rank: int, ready: float) -> Iterable[tuple[Event, float]]:
        start = max(ready, spans[rank][-1].end) if spans[rank] else ready
        end = start + costs[action.model].of(action, rank, len(lists))
        spans[rank].append(Span(action, start, end))
        return ((needs.event(action, rank), end),)

    if not walk(lists, needs.of, do, {}):
        return None
    return Timeline(tuple(map(tuple, spans)))


def in_one_order(
    lists: Sequence[Sequence[Action]], needs: Dependencies
) -> list[tuple[Action, int]] | None:
    """All ranks' compute actions with their ranks, each behind what it waits for and its rank's.

    None if the lists deadlock.
    """
    order: list[tuple[Action, int]] = []

    def do(action: Action, rank: int, ready: float) -> Iterable[tuple[Event, float]]:
        order.append((action, rank))
        return ((needs.event(action, rank), ready),)

    return order if walk(lists, needs.of, do, {}) else None
