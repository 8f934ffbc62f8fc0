"""Adds sends and receives to compute actions.

Invariants (``validate`` proves them, the tests assert them):
- a result that a position on another rank needs is sent once, after it is made, and received
  once, in the same list and before it is used; inputs for a later list are held until then;
- on every edge the receives are in the order of the sends (NCCL matches them by order alone);
- the lists would run even if every send and receive waited for its other end. So whatever waits
  for a rank's device (and thus for all that it has posted), nothing stands still for ever.

All computations are put in one order, that of their ends. A transfer stands in it, on both sides,
where its tensor is made, or later, where its edge has a buffer: a rank has at most
``NUM_BUFFERS`` inputs from an edge that it has not used (those that it holds for a later list
aside). So a receive is posted when its rank has done all that ends before then, and goes on while
it computes what ends later. Where a rank is late, so is the receive.

An edge must have a communicator of its own: on a shared one, an early receive of one direction
would hold up the other direction's sends, and with two pipeline ranks an interleaved model's
forward edges (last rank to first) and backward edges join the same two ranks.

With one pipeline rank nothing is sent: chunks hand over in place.
"""

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from operator import itemgetter

from puzzle_align.schedules.actions import Action, Edge, Kind, Program, edge_of
from puzzle_align.schedules.costs import uniform
from puzzle_align.schedules.dependencies import Dependencies
from puzzle_align.schedules.timeline import Timeline
from puzzle_align.schedules.timing import NUM_BUFFERS, in_one_order, timeline_of

_Place = tuple[int, int]  # behind which computation, and which computation's result it carries


def receive_for(action: Action, rank: int, num_ranks: int, program: Program) -> Action | None:
    """The receive of a compute action's input; None where none comes from another rank.

    What an earlier list has received (``Program.windows``) is not received again.
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
    """The send of a compute action's result on ``rank``, if another rank needs it."""
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
        timeline: when the actions are expected to run; None: as they would if all forwards took as
            long, and a backward two forwards. Where they run at other times, computations hide less
            of the transfers, and nothing else changes.
    """
    by_model = {program.model: program for program in programs}
    num_ranks = len(lists)
    order = _by_their_ends(lists, by_model, timeline)
    if order is None:
        return _each_before_its_use(lists, by_model)
    place = {(action, rank): number for number, (action, rank) in enumerate(order)}
    placed: list[list[tuple[_Place, Action]]] = [[] for _ in lists]
    used: dict[Edge, deque[int]] = {}  # where what was received last is used
    latest: dict[Edge, int] = {}  # of the transfers so far, which stay in their order
    for number, (action, rank) in enumerate(order):
        placed[rank].append(((number, 0), action))
        send = send_after(action, rank, num_ranks, by_model[action.model].num_chunks)
        if send is None:
            continue
        edge = edge_of(send, rank, num_ranks)
        receive = _received(send, edge)
        before = used.setdefault(edge, deque([0] * NUM_BUFFERS, maxlen=NUM_BUFFERS))
        latest[edge] = max(number, before[0], latest.get(edge, 0))
        at = latest[edge], 1 + number
        before.append(place.get((_user_of(receive), edge.destination), 0))
        placed[rank].append((at, send))
        placed[edge.destination].append((at, receive))
    return [[action for _, action in sorted(actions, key=itemgetter(0))] for actions in placed]


def _user_of(receive: Action) -> Action:
    kind = Kind.FORWARD if receive.kind is Kind.RECV_FORWARD else Kind.BACKWARD
    return Action(receive.model, kind, receive.microbatch, receive.chunk)


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


def _received(send: Action, edge: Edge) -> Action:
    """The receive of a send's tensor, with the chunk that uses it."""
    if edge.forward:
        chunk = send.chunk + 1 if edge.wraps else send.chunk
        return Action(send.model, Kind.RECV_FORWARD, send.microbatch, chunk)
    chunk = send.chunk - 1 if edge.wraps else send.chunk
    return Action(send.model, Kind.RECV_BACKWARD, send.microbatch, chunk)


def _by_their_ends(
    lists: Sequence[Sequence[Action]], programs: Mapping[str, Program], timeline: Timeline | None
) -> list[tuple[Action, int]] | None:
    """All compute actions with their ranks, each behind what it waits for; None: they deadlock."""
    num_ranks = len(lists)
    needs = Dependencies(programs.values(), num_ranks)
    order = in_one_order(lists, needs)
    if order is None:
        return None
    if timeline is None:
        costs = {m: uniform(num_ranks * p.num_chunks, 1, 2) for m, p in programs.items()}
        timeline = timeline_of(lists, needs, costs)
        assert timeline is not None, "they have an order"
    ends = {
        needs.event(span.action, rank): span.end
        for rank, spans in enumerate(timeline.ranks)
        for span in spans
    }
    return sorted(order, key=lambda entry: ends[needs.event(*entry)])
