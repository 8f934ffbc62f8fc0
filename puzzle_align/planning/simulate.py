"""What lowered action lists take, transfers included, under the model of time they are proven in.

A rank does its actions in order; only compute takes its time. Sends and receives are posted and
never block. A transfer begins when both its sides are posted and the one before it on its edge has
arrived (a rendezvous, nothing is buffered); compute waits for its own input. An input that no
receive of the list brings is there from the start: an earlier list brought it.

Edges do not slow each other down, and compute is not slowed down by transfers.
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice

from puzzle_align.schedules.actions import Action, Kind, Program
from puzzle_align.schedules.costs import Costs
from puzzle_align.schedules.dependencies import Dependencies
from puzzle_align.schedules.lowering import NUM_BUFFERS, Edge, edge_of
from puzzle_align.schedules.timeline import Span, Timeline
from puzzle_align.schedules.timing import NEVER, numbered, walk

# Time of a transfer by model, source and destination (pipeline ranks).
TransferTime = Callable[[str, int, int], float]
_Input = tuple[str, bool, int, int]  # (model, whether of a forward, microbatch, chunk)
_Arrival = tuple[int, int]  # (channel, n): its n-th transfer


def simulate(
    lists: Sequence[Sequence[Action]], costs: Costs, *, transfer: float | TransferTime = 0.0
) -> Timeline:
    """The timeline of lists that ``schedules.validate`` has proven.

    Its unit is that of ``costs`` and ``transfer``. A transfer that ends after all compute does not
    show: it is the next list that waits for it.
    """
    spans: list[list[Span]] = [[] for _ in lists]
    transfers = _Transfers(len(lists), transfer)

    def do(action: Action, rank: int, ready: float) -> Iterable[tuple[_Arrival, float]]:
        now = spans[rank][-1].end if spans[rank] else 0.0
        if not action.kind.is_compute:
            return transfers.post(action, rank, now)
        start = max(now, ready)
        end = start + costs[action.model].of(action, rank, len(lists))
        spans[rank].append(Span(action, start, end))
        return ()

    assert walk(lists, transfers.inputs_of, do, {}), "the lists deadlock"
    return Timeline(tuple(map(tuple, spans)))


def simulate_compute(
    lists: Sequence[Sequence[Action]],
    programs: Sequence[Program],
    costs: Costs,
    *,
    transfer: float | TransferTime = 0.0,
) -> Timeline:
    """As ``simulate`` of the lowered lists, without making their sends and receives.

    For programs without windows, lowered with this very timeline. Lowered with another, a receive
    may be late: by a few percent of the makespan where a transfer takes a tenth of a forward.
    """
    num_ranks, backward = len(lists), Kind.BACKWARD
    models, num_events = numbered(Dependencies(programs, num_ranks), costs)
    done = [NEVER] * num_events
    edges = {
        (name, kind): _Edges(name, kind, num_ranks, transfer)
        for name in models
        for kind in (Kind.FORWARD, backward)
    }
    spans: list[list[Span]] = [[] for _ in lists]
    waiting: dict[int, int] = {}  # the rank that cannot go on before an event
    runnable = deque(range(num_ranks))
    while runnable:
        rank = runnable.popleft()
        own = spans[rank]
        now = own[-1].end if own else 0.0
        for action in islice(lists[rank], len(own), None):
            model, kind = models[action.model], action.kind
            position = action.chunk * num_ranks + rank
            event = model.first + action.microbatch * model.num_positions + position
            source, time = event - 1 if position else None, model.forward
            if kind is backward:
                event += model.num_forwards
                time = model.backward
                source = event + 1 if position < model.num_positions - 1 else None
            if source is not None:
                if done[source] == NEVER:
                    waiting[source] = rank
                    break
                edge = edges[action.model, kind]
                now = max(now, edge.arrive(rank, done[source]))
                edge.use(rank, now + time[position])
            start, now = now, now + time[position]
            done[event] = now
            own.append(Span(action, start, now))
            if event in waiting:
                runnable.append(waiting.pop(event))
    assert all(len(a) == len(b) for a, b in zip(spans, lists, strict=True)), "the lists deadlock"
    return Timeline(tuple(map(tuple, spans)))


class _Edges:
    """A model's edges in one direction, by the rank that receives."""

    def __init__(
        self, model: str, kind: Kind, num_ranks: int, transfer: float | TransferTime
    ) -> None:
        self._arrived = [0.0] * num_ranks  # what came last
        self._used = [deque([0.0] * NUM_BUFFERS, maxlen=NUM_BUFFERS) for _ in range(num_ranks)]
        step = -1 if kind is Kind.FORWARD else 1
        self._times = [0.0 if callable(transfer) else transfer] * num_ranks
        if callable(transfer):
            sources = ((rank + step) % num_ranks for rank in range(num_ranks))
            self._times = [transfer(model, source, rank) for rank, source in enumerate(sources)]
        if num_ranks == 1:
            self._times = [0.0]

    def use(self, rank: int, end: float) -> None:
        """Give a buffer back at this time."""
        self._used[rank].append(end)

    def arrive(self, rank: int, sent: float) -> float:
        """When arrives what was made at this time."""
        time = max(sent, self._used[rank][0], self._arrived[rank]) + self._times[rank]
        self._arrived[rank] = time
        return time


@dataclass(slots=True)
class _Channel:
    """The transfers of one edge so far: when posted on either side, and when they arrived."""

    number: int
    time: float
    sent: list[float] = field(default_factory=list)
    awaited: list[float] = field(default_factory=list)
    arrived: list[float] = field(default_factory=list)

    def settle(self) -> list[tuple[_Arrival, float]]:
        """Let arrive what both sides have posted."""
        first = len(self.arrived)
        for number in range(first, min(len(self.sent), len(self.awaited))):
            before = self.arrived[-1] if self.arrived else 0.0
            begin = max(self.sent[number], self.awaited[number], before)
            self.arrived.append(begin + self.time)
        return [((self.number, n), self.arrived[n]) for n in range(first, len(self.arrived))]


class _Transfers:
    """What the ranks have posted so far, and the inputs that it brings."""

    def __init__(self, num_ranks: int, transfer: float | TransferTime) -> None:
        self._transfer = transfer
        self._num_ranks = num_ranks
        self._channels: dict[Edge, _Channel] = {}
        self._by_action: dict[tuple[str, Kind, int], _Channel] = {}
        self._inputs: list[dict[_Input, _Arrival]] = [{} for _ in range(num_ranks)]

    def inputs_of(self, action: Action, rank: int) -> tuple[_Arrival, ...]:
        """The transfer that a compute action waits for, if its rank has posted the receive."""
        if not action.kind.is_compute:
            return ()
        forward = action.kind is Kind.FORWARD
        coming = self._inputs[rank].get((action.model, forward, action.microbatch, action.chunk))
        return () if coming is None else (coming,)

    def post(self, action: Action, rank: int, now: float) -> list[tuple[_Arrival, float]]:
        """Post one side of a transfer; what arrives, now that it is."""
        channel = self._channel(action, rank)
        if action.kind.is_send:
            channel.sent.append(now)
        else:
            forward = action.kind is Kind.RECV_FORWARD
            wanted = (action.model, forward, action.microbatch, action.chunk)
            self._inputs[rank][wanted] = channel.number, len(channel.awaited)
            channel.awaited.append(now)
        return channel.settle()

    def _channel(self, action: Action, rank: int) -> _Channel:
        key = (action.model, action.kind, rank)
        if key not in self._by_action:
            edge = edge_of(action, rank, self._num_ranks)
            if edge not in self._channels:
                self._channels[edge] = _Channel(len(self._channels), self._time(edge))
            self._by_action[key] = self._channels[edge]
        return self._by_action[key]

    def _time(self, edge: Edge) -> float:
        if callable(self._transfer):
            return self._transfer(edge.model, edge.source, edge.destination)
        return self._transfer
