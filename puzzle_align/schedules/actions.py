"""Actions: the steps of a pipeline rank, one at a time, as plain data.

A schedule is one list of actions per pipeline rank. ``chunk`` numbers the chunks of a rank
(0 .. V-1); chunk v of pipeline rank p is at virtual position ``v * P + p`` of the model.

Text form of an action: ``actor:F3.0`` (model, kind, microbatch 3, chunk 0).
"""

from dataclasses import dataclass
from enum import Enum


class Kind(Enum):
    """The kind of an action; the value is the kind's text form."""

    FORWARD = "F"
    BACKWARD = "B"
    RECV_FORWARD = "RF"
    SEND_FORWARD = "SF"
    RECV_BACKWARD = "RB"
    SEND_BACKWARD = "SB"

    __hash__ = object.__hash__  # members are singletons: quicker than hashing their names

    @property
    def is_compute(self) -> bool:
        """True for forward and backward, False for sends and receives."""
        return self in (Kind.FORWARD, Kind.BACKWARD)

    @property
    def is_send(self) -> bool:
        """True for both kinds of send."""
        return self in (Kind.SEND_FORWARD, Kind.SEND_BACKWARD)


@dataclass(frozen=True, slots=True)
class Action:
    """One step of one model on one pipeline rank.

    The chunk of a receive is the one that will use the tensor, that of a send the one that made it.
    """

    model: str
    kind: Kind
    microbatch: int
    chunk: int

    def __str__(self) -> str:
        return f"{self.model}:{self.kind.value}{self.microbatch}.{self.chunk}"


@dataclass(frozen=True, slots=True)
class Program:
    """A model's work in a schedule, in no particular order.

    ``num_chunks`` is V, the model's chunks on each pipeline rank; a program without ``backward``
    keeps no activations. ``schedule`` names a row of ``schedules.registry``; None: 1F1B, or
    interleaved if V > 1.

    ``windows`` are for a lookahead model, which is forward-only and whose work continues from one
    list to the next. In this list virtual position q (``chunk * P + rank``) runs only the
    microbatches of ``windows[q]``. Positions near the start are ahead. No transfer crosses lists:
    position q + 1 receives all of ``windows[q]`` and holds the inputs that it does not use yet.

    ``reads`` names the model whose outputs the losses read, at the last position: the forward of a
    microbatch there comes after that model's.
    """

    model: str
    num_microbatches: int
    num_chunks: int = 1
    backward: bool = True
    windows: tuple[range, ...] | None = None
    schedule: str | None = None
    reads: str | None = None

    def microbatches(self, position: int) -> range:
        """Microbatches that a virtual position runs in this list."""
        return range(self.num_microbatches) if self.windows is None else self.windows[position]


@dataclass(frozen=True, slots=True)
class Edge:
    """A first-in-first-out channel between two pipeline ranks.

    ``wraps`` is True between the last and the first rank, where the edge joins different chunks.
    """

    model: str
    source: int
    destination: int
    forward: bool
    wraps: bool


def edge_of(action: Action, rank: int, num_ranks: int) -> Edge:
    """Edge that a send or receive on pipeline rank ``rank`` uses."""
    assert not action.kind.is_compute and num_ranks > 1
    forward = action.kind in (Kind.SEND_FORWARD, Kind.RECV_FORWARD)
    # The peer is the next rank: activations go there, and gradients come from there.
    upwards = action.kind in (Kind.SEND_FORWARD, Kind.RECV_BACKWARD)
    peer = (rank + 1 if upwards else rank - 1) % num_ranks
    wraps = rank == (num_ranks - 1 if upwards else 0)
    source, destination = (rank, peer) if action.kind.is_send else (peer, rank)
    return Edge(action.model, source, destination, forward, wraps)


def user_of(receive: Action) -> Action:
    """Compute action that uses a received tensor."""
    kind = Kind.FORWARD if receive.kind is Kind.RECV_FORWARD else Kind.BACKWARD
    return Action(receive.model, kind, receive.microbatch, receive.chunk)
