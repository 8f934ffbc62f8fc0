"""When the actions of given lists happen: the schedulers' measure of what they propose.

Compute actions only; an input is there as soon as it is made. ``planning.simulate`` times lowered
lists, with transfers.
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence

from puzzle_align.schedules.actions import Action, Dependency, Kind, Program
from puzzle_align.schedules.costs import Costs
from puzzle_align.schedules.timeline import Span, Timeline

Event = tuple[str, Kind, int, int]  # (model, kind, microbatch, virtual position): it is done


class Dependencies:
    """What has to be done before an action, by model and position."""

    def __init__(
        self,
        programs: Iterable[Program],
        num_ranks: int,
        dependencies: Sequence[Dependency] = (),
        lead: int | None = None,
    ) -> None:
        """``lead``: how far a stream's position may be ahead of the next one, in microbatches."""
        self.programs = {program.model: program for program in programs}
        self.num_ranks = num_ranks
        self._last = {m: p.num_chunks * num_ranks - 1 for m, p in self.programs.items()}
        self._lead = lead
        self._before: dict[str, list[Dependency]] = {}
        for dependency in dependencies:
            self._before.setdefault(dependency.after, []).append(dependency)

    def event(self, action: Action, rank: int) -> Event:
        """What is done when ``action`` is done on pipeline rank ``rank``."""
        return action.model, action.kind, action.microbatch, action.chunk * self.num_ranks + rank

    def kept(self, action: Action, rank: int, costs: Costs) -> float:
        """Activations that an action adds to those its rank holds; negative: that it frees."""
        if not self.programs[action.model].backward:
            return 0.0
        size = costs[action.model].kept(action, rank, self.num_ranks)
        return size if action.kind is Kind.FORWARD else -size

    def of(self, action: Action, rank: int) -> list[Event]:
        """The events that ``action`` waits for, whoever brings them about."""
        model, kind, microbatch, position = self.event(action, rank)
        if kind is Kind.BACKWARD:
            needs: list[Event] = [(model, Kind.FORWARD, microbatch, position)]
            if position < self._last[model]:
                needs.append((model, kind, microbatch, position + 1))
            return needs
        needs = []
        if position > 0 and self._runs(model, microbatch, position - 1):
            needs.append((model, kind, microbatch, position - 1))
        if self._lead is not None and position < self._last[model]:
            behind = microbatch - self._lead
            if self.programs[model].windows and self._runs(model, behind, position + 1):
                needs.append((model, kind, behind, position + 1))
        if position == self._last[model]:
            for dependency in self._before.get(model, ()):
                needs += self._outputs(dependency, microbatch)
        return needs

    def _outputs(self, dependency: Dependency, microbatch: int) -> list[Event]:
        before = self.programs[dependency.before]
        position = self._last[before.model]
        wanted = range(before.num_microbatches) if dependency.whole else (microbatch,)
        return [
            (before.model, Kind.FORWARD, number, position)
            for number in wanted
            if number < before.num_microbatches and self._runs(before.model, number, position)
        ]

    def _runs(self, model: str, microbatch: int, position: int) -> bool:
        """Whether a position runs a microbatch in this list (if not, it has in an earlier one)."""
        windows = self.programs[model].windows
        return windows is None or microbatch in windows[position]


# Does an action that can start at the given time or later; its end, or None to stop the rank there.
Visit = Callable[[int, Action, float], float | None]


def walk(
    lists: Sequence[Sequence[Action]], needs: Dependencies, visit: Visit, done: dict[Event, float]
) -> list[int]:
    """Visit every rank's actions in order, each after what it needs; how many were visited.

    ``done`` holds when events come about and grows as actions are visited. A rank stops at an
    action whose needs are never met.
    """
    visited = [0] * len(lists)
    waiting: dict[Event, int] = {}  # the rank that cannot go on before an event
    runnable = deque(range(len(lists)))
    while runnable:
        rank = runnable.popleft()
        while visited[rank] < len(lists[rank]):
            action = lists[rank][visited[rank]]
            inputs = needs.of(action, rank)
            missing = next((event for event in inputs if event not in done), None)
            if missing is not None:
                waiting[missing] = rank
                break
            end = visit(rank, action, max((done[event] for event in inputs), default=0.0))
            if end is None:
                break
            visited[rank] += 1
            event = needs.event(action, rank)
            done[event] = end
            if event in waiting:
                runnable.append(waiting.pop(event))
    return visited


def run(lists: Sequence[Sequence[Action]], needs: Dependencies, costs: Costs) -> Timeline | None:
    """The timeline of compute lists; None if they deadlock."""
    spans: list[list[Span]] = [[] for _ in lists]

    def visit(rank: int, action: Action, ready: float) -> float:
        start = max(ready, spans[rank][-1].end) if spans[rank] else ready
        end = start + costs[action.model].of(action, rank, len(lists))
        spans[rank].append(Span(action, start, end))
        return end

    visited = walk(lists, needs, visit, {})
    if visited != [len(actions) for actions in lists]:
        return None
    return Timeline(tuple(map(tuple, spans)))
