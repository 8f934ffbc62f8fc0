"""Simulation of action lists, and a lower bound for any order of their actions.

A rank runs its actions in order; only compute takes time of the rank. A transfer begins when both
its sides are posted and the transfer before it on its edge has arrived (a rendezvous, nothing is
buffered); compute waits for its input. Transfers slow down neither each other nor compute.

``walk`` runs any lists by the events that actions cause and wait for; ``simulate`` uses it for
lowered lists. ``timeline_of`` is quicker: it runs compute actions alone, as schedulers make them. A
transfer then begins when its tensor is made, the transfer before it on its edge has arrived, and
its receiver has one of ``NUM_BUFFERS`` free. The two agree on lists that ``lowering`` makes with
this timeline; in lists lowered with another one a receive may be late, by a few percent of the
makespan if a transfer takes a tenth of a forward.
"""

from collections import deque
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, islice, pairwise
from math import inf
from typing import TypeVar

from puzzle_align.schedules.actions import Action, Edge, Kind, edge_of, user_of
from puzzle_align.schedules.costs import Costs, ModelCosts
from puzzle_align.schedules.dependencies import Dependencies, Event
from puzzle_align.schedules.timeline import Span, Timeline

E = TypeVar("E", bound=Hashable)
NUM_BUFFERS = 2  # inputs of an edge that a rank holds: one in use, one being received

# (model, source, destination) -> time of a transfer; source and destination are pipeline ranks.
TransferTime = Callable[[str, int, int], float]
_Transfer = tuple[int, int]  # (channel, n): its n-th transfer


def walk(
    lists: Sequence[Sequence[Action]],
    inputs_of: Callable[[Action, int], Iterable[E]],
    do: Callable[[Action, int, float], Iterable[tuple[E, float]] | None],
    done: dict[E, float],
) -> bool:
    """Run every rank's actions in order, each once the events that it waits for have happened.

    A rank stops at an action whose inputs never happen.

    Args:
        lists: actions of every pipeline rank.
        inputs_of: ``(action, rank)`` -> events that the action waits for. Called when the rank's
            previous actions are done.
        do: ``(action, rank, time)`` -> events that the action causes, each with its time; None to
            stop the rank before the action. All its inputs have happened at ``time``.
        done: times of the events that have happened; grows as actions are done.

    Returns:
        Whether every rank is at the end of its list.
    """
    at = [0] * len(lists)
    waiting: dict[E, list[int]] = {}  # the ranks that wait for an event
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


def simulate(
    lists: Sequence[Sequence[Action]], costs: Costs, *, transfer: float | TransferTime = 0.0
) -> Timeline:
    """Timeline of lowered lists that ``schedules.validate`` has accepted.

    Its unit is that of ``costs`` and ``transfer``. An input without a receive in the lists is ready
    from the start: an earlier list received it. A transfer that ends after all compute does not
    count: only the next list waits for it.
    """
    num_ranks = len(lists)
    spans: list[list[Span]] = [[] for _ in lists]
    channels: dict[Edge, _Channel] = {}
    inputs: dict[tuple[Action, int], _Transfer] = {}  # awaited by a compute action of a rank

    def inputs_of(action: Action, rank: int) -> tuple[_Transfer, ...]:
        return (inputs[action, rank],) if (action, rank) in inputs else ()

    def do(action: Action, rank: int, ready: float) -> Iterable[tuple[_Transfer, float]]:
        now = spans[rank][-1].end if spans[rank] else 0.0
        if action.kind.is_compute:
            start = max(now, ready)
            time = costs[action.model].of(action, rank, num_ranks)
            spans[rank].append(Span(action, start, start + time))
            return ()
        edge = edge_of(action, rank, num_ranks)
        if edge not in channels:
            time = _seconds(transfer, edge.model, edge.source, edge.destination)
            channels[edge] = _Channel(len(channels), time)
        channel = channels[edge]
        if action.kind.is_send:
            channel.sent.append(now)
        else:
            inputs[user_of(action), rank] = channel.number, len(channel.awaited)
            channel.awaited.append(now)
        return channel.arrive()

    assert walk(lists, inputs_of, do, {}), "the lists deadlock"
    return Timeline(tuple(map(tuple, spans)))


@dataclass(slots=True)
class _Channel:
    """An edge's transfers so far: times at which each side was posted, and of arrivals."""

    number: int
    time: float  # of a transfer
    sent: list[float] = field(default_factory=list)
    awaited: list[float] = field(default_factory=list)
    arrived: list[float] = field(default_factory=list)

    def arrive(self) -> Iterable[tuple[_Transfer, float]]:
        """The next transfer with its arrival time, once both its sides are posted."""
        next_one = len(self.arrived)
        if len(self.sent) == next_one or len(self.awaited) == next_one:
            return ()
        before = self.arrived[-1] if self.arrived else 0.0
        begin = max(self.sent[next_one], self.awaited[next_one], before)
        self.arrived.append(begin + self.time)
        return (((self.number, next_one), self.arrived[-1]),)


def timeline_of(
    lists: Sequence[Sequence[Action]],
    graph: Dependencies,
    costs: Costs,
    transfer: float | TransferTime = 0.0,
) -> Timeline:
    """Timeline of compute lists, which must not deadlock.

    ``transfer`` must be 0 for programs that have windows or read outputs.
    """
    times = _times(lists, graph, costs, transfer)
    return Timeline(
        tuple(
            tuple(Span(action, *span) for action, span in zip(actions, spans, strict=True))
            for actions, spans in zip(lists, times, strict=True)
        )
    )


def makespan_of(lists: Sequence[Sequence[Action]], graph: Dependencies, costs: Costs) -> float:
    """Makespan of ``timeline_of``, without making the spans, which takes long."""
    times = _times(lists, graph, costs, 0.0)
    return max((spans[-1][1] for spans in times if spans), default=0.0)


def _times(
    lists: Sequence[Sequence[Action]],
    graph: Dependencies,
    costs: Costs,
    transfer: float | TransferTime,
) -> list[list[tuple[float, float]]]:
    """Start and end of every action, by rank.

    The same algorithm as ``walk``. Schedulers time many lists, so events are numbers here, for
    speed: a model's forwards by ``(microbatch, position)``, then its backwards, model by model.
    """
    num_ranks, backward = len(lists), Kind.BACKWARD
    models, num_events = _numbered(graph, costs)
    kinds = (Kind.FORWARD, Kind.BACKWARD) if transfer != 0.0 else ()
    edges = {(m, kind): _Edges(m, kind, num_ranks, transfer) for m in models for kind in kinds}
    done = [_NEVER] * num_events + [0.0]  # the last, number -1, has happened from the start
    free = [0.0] * num_ranks
    times: list[list[tuple[float, float]]] = [[] for _ in lists]
    waiting: dict[int, list[int]] = {}  # the ranks that wait for an event
    runnable = deque(range(num_ranks))
    while runnable:
        rank = runnable.popleft()
        spans, now = times[rank], free[rank]
        for action in islice(lists[rank], len(spans), None):
            model = models[action.model]
            position = action.chunk * num_ranks + rank
            event = model.first + action.microbatch * model.num_positions + position
            if action.kind is backward:
                time, before = model.backward[position], event
                event += model.num_forwards
                comes = position < model.num_positions - 1
                if comes:
                    before = event + 1  # the next position's backward: after this one's forward
            else:
                time, comes = model.forward[position], position > 0
                before = event - 1 if comes else -1
                if position >= model.num_plain:
                    inputs = (_number(models, each) for each in graph.of(action, rank))
                    before = max(inputs, key=done.__getitem__, default=-1)
            ready = done[before]
            if ready == _NEVER:
                waiting.setdefault(before, []).append(rank)
                break
            if edges and comes:
                edge = edges[action.model, action.kind]
                ready = edge.arrive(rank, ready)
                edge.use(rank, max(now, ready) + time)
            start = ready if ready > now else now
            now = done[event] = start + time
            spans.append((start, now))
            if event in waiting:
                runnable.extend(waiting.pop(event))
        free[rank] = now
    assert list(map(len, times)) == list(map(len, lists)), "the lists deadlock"
    return times


def in_one_order(
    lists: Sequence[Sequence[Action]], graph: Dependencies
) -> list[tuple[Action, int]] | None:
    """All ranks' compute actions with their ranks, each after its inputs and earlier actions.

    None if the lists deadlock.
    """
    order: list[tuple[Action, int]] = []

    def do(action: Action, rank: int, ready: float) -> Iterable[tuple[Event, float]]:
        order.append((action, rank))
        return ((graph.event(action, rank), ready),)

    return order if walk(lists, graph.of, do, {}) else None


_NEVER = inf  # after all times


@dataclass(frozen=True, slots=True)
class _Numbered:
    """A model's events as numbers, and their times.

    A forward is ``first + microbatch * num_positions + position``, its backward ``num_forwards``
    more. At the first ``num_plain`` positions a forward waits for the position before it alone.
    """

    first: int
    num_positions: int
    num_forwards: int
    forward: Sequence[float]
    backward: Sequence[float]
    num_plain: int


def _numbered(graph: Dependencies, costs: Costs) -> tuple[dict[str, _Numbered], int]:
    """Every model's numbering, and the number of all events."""
    models, first = {}, 0
    for name, program in graph.programs.items():
        positions = program.num_chunks * graph.num_ranks
        number, times = program.num_microbatches * positions, costs[name]
        plain = graph.num_plain(name)
        models[name] = _Numbered(first, positions, number, times.forward, times.backward, plain)
        first += 2 * number if program.backward else number
    return models, first


def _number(models: dict[str, _Numbered], event: Event) -> int:
    name, kind, microbatch, position = event
    model = models[name]
    number = model.first + microbatch * model.num_positions + position
    return number if kind is Kind.FORWARD else number + model.num_forwards


class _Edges:
    """A model's edges in one direction, by receiving rank."""

    def __init__(
        self, model: str, kind: Kind, num_ranks: int, transfer: float | TransferTime
    ) -> None:
        self._arrived = [0.0] * num_ranks  # arrival of the latest input
        self._used = [deque([0.0] * NUM_BUFFERS, maxlen=NUM_BUFFERS) for _ in range(num_ranks)]
        step = -1 if kind is Kind.FORWARD else 1
        self._times = [0.0] * num_ranks
        for rank in range(num_ranks if num_ranks > 1 else 0):
            self._times[rank] = _seconds(transfer, model, (rank + step) % num_ranks, rank)

    def use(self, rank: int, end: float) -> None:
        """Free a buffer of ``rank`` at time ``end``."""
        self._used[rank].append(end)

    def arrive(self, rank: int, sent: float) -> float:
        """Arrival time of an input that was made at time ``sent``."""
        time = max(sent, self._used[rank][0], self._arrived[rank]) + self._times[rank]
        self._arrived[rank] = time
        return time


def _seconds(transfer: float | TransferTime, model: str, source: int, destination: int) -> float:
    return transfer(model, source, destination) if callable(transfer) else transfer


def least_makespan(
    costs: Costs,
    counts: Mapping[str, float],
    num_ranks: int,
    transfer: float | TransferTime = 0.0,
) -> float:
    """Lower bound of the makespan of models on one pipeline, for any order of their actions.

    The most over ranks of: the time until a first microbatch reaches the rank, all its work, and
    the time from its last action until the microbatch (or its gradient) leaves the pipeline.
    ``counts`` are the models' microbatches. Windows of a lookahead model are ignored.
    """
    work, before, after = [0.0] * num_ranks, [inf] * num_ranks, [inf] * num_ranks
    pairs = list(pairwise(range(num_ranks)))
    for model, count in counts.items():
        times = costs[model]
        to_next = [_seconds(transfer, model, *pair) for pair in pairs]
        arrival = _sums(times.forward[:num_ranks], to_next)
        if times.backward:
            back = [_seconds(transfer, model, b, a) for a, b in pairs]
            departure = _sums(times.backward[:num_ranks], back)
        else:  # the positions after the rank's last one
            last = times.forward[-num_ranks:]
            departure = _sums(last[::-1], to_next[::-1])[::-1]
        for rank in range(num_ranks):
            work[rank] += count * work_of(times, rank, num_ranks)
            before[rank] = min(before[rank], arrival[rank])
            after[rank] = min(after[rank], departure[rank])
    return max(map(sum, zip(before, work, after, strict=True)))


def _sums(times: Sequence[float], hops: Sequence[float]) -> list[float]:
    """Sum of the times and hops before every position."""
    steps = (time + hop for time, hop in zip(times[:-1], hops, strict=True))
    return [0.0, *accumulate(steps)]


def busiest_rank(costs: Mapping[str, ModelCosts], num_ranks: int) -> float:
    """Work of the busiest rank for one microbatch of every model."""
    ranks = range(num_ranks)
    return max(sum(work_of(each, rank, num_ranks) for each in costs.values()) for rank in ranks)


def work_of(costs: ModelCosts, rank: int, num_ranks: int) -> float:
    """Time of a microbatch on a pipeline rank, in all its chunks together."""
    return sum(costs.forward[rank::num_ranks]) + sum(costs.backward[rank::num_ranks])
