"""The timeline of lowered lists, transfers included, under the model of time they are proven in.

A rank does its actions in order; only compute takes its time. Sends and receives are posted and
never block. A transfer begins when both its sides are posted and the one before it on its edge has
arrived (a rendezvous, nothing is buffered); compute waits for its own input. An input that no
receive of the list brings is there from the start: an earlier list brought it.

Edges do not slow each other down, and compute is not slowed down by transfers.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from puzzle_align.schedules.actions import Action, Kind
from puzzle_align.schedules.costs import Costs
from puzzle_align.schedules.lowering import Edge, edge_of
from puzzle_align.schedules.timeline import Span, Timeline
from puzzle_align.schedules.timing import TransferTime, walk

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
    """Transfers that ranks have posted so far, and the inputs that they bring."""

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
