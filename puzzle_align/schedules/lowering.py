"""Adds sends and receives to compute actions.

Invariants (``validate`` proves them, the tests assert them):
- what a position of the model makes for a position on another rank is sent once, right after it
  is made, and received once, before it is used (a stream's may be used in a later list);
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
    block; with more it must only be posted. What is received for a later list stands at the end.
    """
    by_model = {program.model: program for program in programs}
    held = _held(lists, by_model)
    return [
        _lower_rank(actions, rank, len(lists), by_model, lookahead) + held[rank]
        for rank, actions in enumerate(lists)
    ]


def _lower_rank(
    actions: Sequence[Action],
    rank: int,
    num_ranks: int,
    programs: dict[str, Program],
    lookahead: int,
) -> list[Action]:
    receives: list[list[Action]] = [[] for _ in actions]
    for index, action in enumerate(actions):
        receive = receive_for(action, rank, num_ranks, programs[action.model])
        if receive is not None:
            receives[max(0, index - lookahead)].append(receive)
    lowered = []
    for before, action in zip(receives, actions, strict=True):
        send = send_after(action, rank, num_ranks, programs[action.model].num_chunks)
        lowered += [*before, action]
        if send is not None:
            lowered.append(send)
    return lowered


def _held(lists: Sequence[Sequence[Action]], programs: dict[str, Program]) -> list[list[Action]]:
    """The receives of what a rank does not run in these lists, in the order of the sends."""
    held: list[list[Action]] = [[] for _ in lists]
    for source, actions in enumerate(lists):
        rank = (source + 1) % len(lists)
        for action in actions:
            program = programs[action.model]
            if program.windows is None or len(lists) == 1:
                continue
            position = action.chunk * len(lists) + source + 1
            last = position == program.num_chunks * len(lists)
            if not last and action.microbatch not in program.microbatches(position):
                chunk = position // len(lists)
                receive = Action(action.model, Kind.RECV_FORWARD, action.microbatch, chunk)
                held[rank].append(receive)
    return held
