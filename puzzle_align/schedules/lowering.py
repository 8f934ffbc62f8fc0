"""Lowering: add sends and receives to compute actions.

Invariants (``validate`` proves them, the tests assert them):
- a result that a position on another rank uses is sent once, after it is made, and received
  once, in the same list and before it is used; inputs for a later list are held until then;
- on every edge the receives are in the order of the sends (NCCL matches them by order alone);
- the lists would run even if every send and receive blocked until its other end is posted. So a
  wait for a rank's whole device (and thus for all transfers that it has posted) cannot deadlock.

All computations are sorted by their ends. A transfer's place in this order, on both ranks, is after
the computation that makes its tensor, or later, when its edge has a free buffer: a rank holds at
most ``NUM_BUFFERS`` unused inputs of an edge (not counting inputs for a later list). So a receive
is posted when its rank has done all computations that end before that place, and overlaps those
that end later. If a rank is late, so is the receive.

Every edge must have a separate communicator: on a shared one, an early receive of one direction
would hold up the other direction's sends, and with two pipeline ranks an interleaved model's
forward edges (last rank to first) and backward edges join the same two ranks.

With one pipeline rank nothing is sent: chunks pass their outputs on in place.
"""

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from operator import itemgetter

from puzzle_align.schedules.actions import Action, Edge, Kind, Program, edge_of, user_of
from puzzle_align.schedules.costs import ModelCosts
from puzzle_align.schedules.dependencies import Dependencies
from puzzle_align.schedules.timeline import Timeline
from puzzle_align.schedules.timing import NUM_BUFFERS, in_one_order, timeline_of

# Sort key of an action: number of the computation it follows, number of the one whose result it
# carries.
_Place = tuple[int, int]


def receive_for(action: Action, rank: int, num_ranks: int, program: Program) -> Action | None:
    """Receive of a compute action's input; None if the input does not come from another rank.

    An input that an earlier list has received (``Program.windows``) is not received again.
    """
    assert action.kind.is_compute
    position = action.chunk * num_ranks + rank
    forward = action.kind is Kind.FORWARD
    source = position - 1 if forward else position + 1
    if num_ranks == 1 or not 0 <= source < num_ranks * program.num_chunks:
        return None
    if action.microbatch not in program.microbatches(source):
        return None
    kind = Kind.RECV_FORWARD if forward else Kind.RECV_BACKWARD
    return Action(action.model, kind, action.microbatch, action.chunk)


def send_after(action: Action, rank: int, num_ranks: int, num_chunks: int) -> Action | None:
    """Send of a compute action's result on ``rank``; None if no other rank uses it."""
    assert action.kind.is_compute
    first = rank == 0 and action.chunk == 0
    last = rank == num_ranks - 1 and action.chunk == num_chunks - 1
    if num_ranks == 1 or (last if action.kind is Kind.FORWARD else first):
        return None
    kind = Kind.SEND_FORWARD if action.kind is Kind.FORWARD else Kind.SEND_BACKWARD
    return Action(action.model, kind, action.microbatch, action.chunk)


def lower(
    lists: Sequence[Sequence[Action]],
    programs: Iterable[Program],
    timeline: Timeline | None = None,
) -> list[list[Action]]:
    """Compute actions with their sends and receives.

    Args:
        timeline: when the actions are expected to run; None: equal forwards, and backwards that
            take twice as long. If they run at other times, computations hide less of the transfers;
            nothing else changes.
    """
    by_model = {program.model: program for program in programs}
    num_ranks = len(lists)
    order = _by_their_ends(lists, by_model, timeline)
    if order is None:
        return _each_before_its_use(lists, by_model)
    place = {(action, rank): number for number, (action, rank) in enumerate(order)}
    placed: list[list[tuple[_Place, Action]]] = [[] for _ in lists]
    used: dict[Edge, deque[int]] = {}  # where the latest inputs of an edge are used
    latest: dict[Edge, int] = {}  # place of an edge's latest transfer: transfers keep their order
    for number, (action, rank) in enumerate(order):
        placed[rank].append(((number, 0), action))
        send = send_after(action, rank, num_ranks, by_model[action.model].num_chunks)
        if send is None:
            continue
        edge = edge_of(send, rank, num_ranks)
        receive = receive_of(send, edge)
        before = used.setdefault(edge, deque([0] * NUM_BUFFERS, maxlen=NUM_BUFFERS))
        latest[edge] = max(number, before[0], latest.get(edge, 0))
        at = latest[edge], 1 + number
        before.append(place.get((user_of(receive), edge.destination), 0))
        placed[rank].append((at, send))
        placed[edge.destination].append((at, receive))
    return [[action for _, action in sorted(actions, key=itemgetter(0))] for actions in placed]


def _each_before_its_use(
    lists: Sequence[Sequence[Action]], programs: Mapping[str, Program]
) -> list[list[Action]]:
    """Transfers for lists that deadlock, so that validation can report them."""
    lowered: list[list[Action]] = [[] for _ in lists]
    for rank, actions in enumerate(lists):
        for action in actions:
            program = programs[action.model]
            receive = receive_for(action, rank, len(lists), program)
            send = send_after(action, rank, len(lists), program.num_chunks)
            lowered[rank] += [each for each in (receive, action, send) if each is not None]
    return lowered


def receive_of(send: Action, edge: Edge) -> Action:
    """Receive that matches a send, with the chunk that uses the tensor."""
    if edge.forward:
        chunk = send.chunk + 1 if edge.wraps else send.chunk
        return Action(send.model, Kind.RECV_FORWARD, send.microbatch, chunk)
    chunk = send.chunk - 1 if edge.wraps else send.chunk
    return Action(send.model, Kind.RECV_BACKWARD, send.microbatch, chunk)


def _by_their_ends(
    lists: Sequence[Sequence[Action]], programs: Mapping[str, Program], timeline: Timeline | None
) -> list[tuple[Action, int]] | None:
    """All compute actions with their ranks, each after its inputs; None if they deadlock."""
    num_ranks = len(lists)
    graph = Dependencies(programs.values(), num_ranks)
    order = in_one_order(lists, graph)
    if order is None:
        return None
    if timeline is None:
        positions = {model: num_ranks * program.num_chunks for model, program in programs.items()}
        costs = {m: ModelCosts((1.0,) * number, (2.0,) * number) for m, number in positions.items()}
        timeline = timeline_of(lists, graph, costs)
    ends = {
        graph.event(span.action, rank): span.end
        for rank, spans in enumerate(timeline.ranks)
        for span in spans
    }
    return sorted(order, key=lambda entry: ends[graph.event(*entry)])
