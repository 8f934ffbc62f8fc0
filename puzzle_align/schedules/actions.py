"""Actions: the steps of a pipeline rank, one at a time, as plain data.

A schedule is one list of actions a pipeline rank. ``chunk`` is the rank's own chunk number
(0 .. V-1); chunk v of pipeline rank p stands at virtual position ``v * P + p`` of the model.

Text form of an action: ``actor:F3.0`` (model, kind, microbatch 3, chunk 0). A schedule's CSV form
has one line a rank, in order.
"""

import re
from dataclasses import dataclass
from enum import Enum


class Kind(Enum):
    """The kind of an action; the value is its text form."""

    FORWARD = "F"
    BACKWARD = "B"
    RECV_FORWARD = "RF"
    SEND_FORWARD = "SF"
    RECV_BACKWARD = "RB"
    SEND_BACKWARD = "SB"

    __hash__ = object.__hash__  # members are single objects: quicker than by their names

    @property
    def is_compute(self) -> bool:
        """True for forward and backward, False for sends and receives."""
        return self in (Kind.FORWARD, Kind.BACKWARD)

    @property
    def is_send(self) -> bool:
        """True for sends."""
        return self in (Kind.SEND_FORWARD, Kind.SEND_BACKWARD)


@dataclass(frozen=True, slots=True)
class Action:
    """One step of one model on one pipeline rank.

    A receive carries the chunk that will use what it receives, a send the chunk that made it.
    """

    model: str
    kind: Kind
    microbatch: int
    chunk: int

    def __str__(self) -> str:
        return f"{self.model}:{self.kind.value}{self.microbatch}.{self.chunk}"


@dataclass(frozen=True, slots=True)
class Program:
    """A model's work in a schedule, whatever the order.

    ``num_chunks`` is V, the model's chunks on each pipeline rank; a program without ``backward``
    keeps no activations. ``schedule`` names a row of ``schedules.registry``; None: by the chunks.

    ``windows`` are for a lookahead model: forward-only, it goes on from list to list. In this one
    virtual position q (``chunk * P + rank``) runs the microbatches of ``windows[q]``, not all of
    them. Positions near the start are ahead; a list's transfers are complete, so position q + 1
    receives all of ``windows[q]`` and holds what it does not run yet.
    """

    model: str
    num_microbatches: int
    num_chunks: int = 1
    backward: bool = True
    windows: tuple[range, ...] | None = None
    schedule: str | None = None

    def microbatches(self, position: int) -> range:
        """The microbatches that a virtual position runs in this list."""
        return range(self.num_microbatches) if self.windows is None else self.windows[position]


@dataclass(frozen=True, slots=True)
class Dependency:
    """A dependency of a model's forwards on another's, at the last position, which has outputs.

    A forward of ``after`` needs that of ``before`` of the same microbatch; if ``whole``, all.
    """

    before: str
    after: str
    whole: bool = False


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


_ACTION = re.compile(r"([A-Za-z_][\w-]*):(F|B|RF|SF|RB|SB)(\d+)\.(\d+)", re.ASCII)


def parse_action(text: str) -> Action:
    """The action of a text form; ValueError where it is none."""
    match = _ACTION.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"{text!r} is not an action; write model:kind, as in 'actor:F3.0'")
    model, kind, microbatch, chunk = match.groups()
    return Action(model, Kind(kind), int(microbatch), int(chunk))


def to_csv(lists: list[list[Action]]) -> str:
    """A schedule's CSV form."""
    return "".join(",".join(map(str, actions)) + "\n" for actions in lists)


def from_csv(text: str) -> list[list[Action]]:
    """The schedule of a CSV form; an empty line is a rank with nothing to do."""
    lists = []
    for line in text.splitlines():
        cells = line.split(",") if line.strip() else []
        lists.append([parse_action(cell) for cell in cells])
    return lists
