"""What lowered action lists take, transfers included, under the model of time they are proven in.

A rank does its actions in order; only compute takes its time. Sends and receives are posted and
never block. A transfer begins when both its sides are posted and the one before it on its edge has
arrived (a rendezvous, nothing is buffered); compute waits for its own input. An input that no
receive of the list brings is there from the start: an earlier list brought it.

Edges do not slow each other down, and compute is not slowed down by transfers.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from puzzle_align.schedules.actions import Action, Kind
from puzzle_align.schedules.costs import Costs
from puzzle_align.schedules.lowering import Edge, edge_of
from puzzle_align.schedules.timeline import Span, Timeline

# Time of a transfer by model, source and destination (pipeline ranks).
TransferTime = Callable[[str, int, int], float]
_Input = tuple[str, bool, int, int]  # (model, whether of a forward, microbatch, chunk)


def simulate(
    lists: Sequence[Sequence[Action]], costs: Costs, *, transfer: float | TransferTime = 0.0
) -> Timeline:
    """The timeline of lists that ``schedules.validate`` has proven.

    Its unit is that of ``costs`` and ``transfer``. A transfer that ends after all compute does not
    show: it is the next list that waits for it.
    """
    pipeline = _Pipeline(lists, costs, transfer)
    runnable = deque(range(len(lists)))
    while runnable:
        runnable.extend(pipeline.advance(runnable.popleft()))
    assert pipeline.is_done, "the lists deadlock"
    return Timeline(tuple(map(tuple, pipeline.spans)))


@dataclass(slots=True)
class _Channel:
    """The transfers of one edge so far: when posted on either side, and when they arrived."""

    edge: Edge
    time: float
    sent: list[float] = field(default_factory=list)
    awaited: list[float] = field(default_factory=list)
    arrived: list[float] = field(default_factory=list)

    def settle(self) -> bool:
        """Let arrive what both sides have posted; whether anything did."""
        first = len(self.arrived)
        for number in range(first, min(len(self.sent), len(self.awaited))):
            before = self.arrived[-1] if self.arrived else 0.0
            begin = max(self.sent[number], self.awaited[number], before)
            self.arrived.append(begin + self.time)
        return len(self.arrived) > first


class _Pipeline:
    """The ranks in the middle of their lists."""

    def __init__(
        self, lists: Sequence[Sequence[Action]], costs: Costs, transfer: float | TransferTime
    ) -> None:
        self.spans: list[list[Span]] = [[] for _ in lists]
        self._lists, self._costs, self._transfer = lists, costs, transfer
        self._at = [0] * len(lists)
        self._now = [0.0] * len(lists)  # when a rank can do its next action
        self._channels: dict[Edge, _Channel] = {}
        self._by_action: dict[tuple[str, Kind, int], _Channel] = {}
        # What a receive brings is the channel's k-th.
        self._inputs: list[dict[_Input, tuple[_Channel, int]]] = [{} for _ in lists]

    @property
    def is_done(self) -> bool:
        """Whether all ranks are at their end."""
        return self._at == [len(actions) for actions in self._lists]

    def advance(self, rank: int) -> list[int]:
        """Take a rank as far as it gets; the ranks for which something has arrived."""
        actions, woken = self._lists[rank], []
        while self._at[rank] < len(actions):
            action = actions[self._at[rank]]
            if not action.kind.is_compute:
                channel = self._post(action, rank)
                if channel.settle() and channel.edge.destination != rank:
                    woken.append(channel.edge.destination)
            elif not self._compute(action, rank):
                break
            self._at[rank] += 1
        return woken

    def _compute(self, action: Action, rank: int) -> bool:
        """Do a compute action, if its input can be said to arrive."""
        start = self._now[rank]
        forward = action.kind is Kind.FORWARD
        coming = self._inputs[rank].get((action.model, forward, action.microbatch, action.chunk))
        if coming is not None:
            channel, number = coming
            if number >= len(channel.arrived):
                return False
            start = max(start, channel.arrived[number])
        end = start + self._costs[action.model].of(action, rank, len(self._lists))
        self.spans[rank].append(Span(action, start, end))
        self._now[rank] = end
        return True

    def _post(self, action: Action, rank: int) -> _Channel:
        channel = self._channel(action, rank)
        if action.kind.is_send:
            channel.sent.append(self._now[rank])
        else:
            forward = action.kind is Kind.RECV_FORWARD
            wanted = (action.model, forward, action.microbatch, action.chunk)
            self._inputs[rank][wanted] = channel, len(channel.awaited)
            channel.awaited.append(self._now[rank])
        return channel

    def _channel(self, action: Action, rank: int) -> _Channel:
        key = (action.model, action.kind, rank)
        if key not in self._by_action:
            edge = edge_of(action, rank, len(self._lists))
            if edge not in self._channels:
                self._channels[edge] = _Channel(edge, self._time(edge))
            self._by_action[key] = self._channels[edge]
        return self._by_action[key]

    def _time(self, edge: Edge) -> float:
        if callable(self._transfer):
            return self._transfer(edge.model, edge.source, edge.destination)
        return self._transfer
