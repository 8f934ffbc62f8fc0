"""Adds sends and receives to compute actions.

Invariants (``validate`` proves them, the tests assert them):
- what a position of the model makes for a position on another rank is sent once, right after it
  is made, and received once, in the same list and before it is used; what a rank runs in a later
  list it holds until then;
- on every edge the receives are in the order of the sends (NCCL matches them by order alone).

An edge must have a communicator of its own: on a shared one, an early receive of one direction
would hold up the other direction's sends, and with two pipeline ranks an interleaved model's
forward edges (last rank to first) and backward edges join the same two ranks.

With one pipeline rank nothing is sent: chunks hand over in place.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from puzzle_align.schedules.actions import Action, Kind, Program


@dataclass(frozen=True, slots=True)
class Edge:
    """A first-in-first-out channel between two pipeline ranks.

    ``wraps`` tells the edge between the last and the first rank, which joins different chunks.
    """

    model: str
    source: int
    destination: int
    forward: bool
    wraps: bool


def edge_of(action: Action, rank: int, num_ranks: int) -> Edge:
    """The edge that a send or receive on pipeline rank ``rank`` uses."""
    assert not action.kind.is_compute and num_ranks > 1
    forward = action.kind in (Kind.SEND_FORWARD, Kind.RECV_FORWARD)
    # Towards the next rank: forwards go there, and what it sends back comes from there.
    upwards = action.kind in (Kind.SEND_FORWARD, Kind.RECV_BACKWARD)
    peer = (rank + 1 if upwards else rank - 1) % num_ranks
    wraps = rank == (num_ranks - 1 if upwards else 0)
    source, destination = (rank, peer) if action.kind.is_send else (peer, rank)
    return Edge(action.model, source, destination, forward, wraps)


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
    """The send of what a compute action on ``rank`` made, if another rank needs it."""
    assert action.kind.is_compute
    first = rank == 0 and action.chunk == 0
    last = rank == num_ranks - 1 and action.chunk == num_chunks - 1
    if num_ranks == 1 or (last if action.kind is Kind.FORWARD else first):
        return None
    kind = Kind.SEND_FORWARD if action.kind is Kind.FORWARD else Kind.SEND_BACKWARD
    return Action(action.model, kind, action.microbatch, action.chunk)


def lower(
    lists: Sequence[Sequence[Action]], programs: Iterable[Program], lookahead: int = 1
) -> list[list[Action]]:
    """Compute actions with their sends and receives.

    A receive stands ``lookahead`` compute actions ahead of the one that needs it, so that the
    transfer goes on meanwhile; each place ahead holds one more input buffer. With 0 a receive may
    block; with more it must only be posted.
    """
    by_model = {program.model: program for program in programs}
    return [_lower_rank(lists, rank, by_model, lookahead) for rank in range(len(lists))]


def _lower_rank(
    lists: Sequence[Sequence[Action]], rank: int, programs: dict[str, Program], lookahead: int
) -> list[Action]:
    actions, num_ranks = lists[rank], len(lists)
    places: dict[Action, int] = {}  # number of the compute action that a receive stands before
    for index, action in enumerate(actions):
        receive = receive_for(action, rank, num_ranks, programs[action.model])
        if receive is not None:
            places[receive] = max(0, index - lookahead)
    places |= _held(lists, rank, programs, places)
    receives: list[list[Action]] = [[] for _ in range(len(actions) + 1)]
    for receive, place in places.items():
        receives[place].append(receive)
    lowered = []
    for before, action in zip(receives, actions, strict=False):
        send = send_after(action, rank, num_ranks, programs[action.model].num_chunks)
        lowered += [*before, action]
        if send is not None:
            lowered.append(send)
    return lowered + receives[-1]


def _held(
    lists: Sequence[Sequence[Action]],
    rank: int,
    programs: dict[str, Program],
    places: dict[Action, int],
) -> dict[Action, int]:
    """Places for the receives of what the rank holds for a later list.

    Each stands behind the one before it on its edge, and as far into the list as its send is into
    the sender's: earlier it would take a buffer for nothing, later it would keep the sender's.
    """
    actions, sender, num_ranks = lists[rank], lists[rank - 1], len(lists)
    held: dict[Action, int] = {}
    last: dict[str, int] = {}
    for number, action in enumerate(sender, start=1):
        program = programs[action.model]
        position = action.chunk * num_ranks + (rank - 1) % num_ranks + 1  # of who receives
        if program.windows is None or num_ranks == 1 or position == num_ranks * program.num_chunks:
            continue
        receive = Action(action.model, Kind.RECV_FORWARD, action.microbatch, position // num_ranks)
        place = places.get(receive)
        if place is None:
            place = max(last.get(action.model, 0), number * len(actions) // len(sender))
            held[receive] = place
        last[action.model] = place
    return held
