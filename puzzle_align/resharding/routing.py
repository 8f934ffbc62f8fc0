"""Routing table: sender, box, tensor and receivers of every transfer when a plan changes.

A box is a rectangle of a tensor. A box that several ranks miss may be broadcast, by van de Geijn's
scatter and all-gather from rank to rank, which takes no communicator per set of ranks: the box is
cut into parts, each part goes to one of the ranks, and that rank relays it to the others. This is
always done between nodes: a node without a holder receives each number once and passes it on
inside. It is also done if a holder would otherwise finish last: it sends one box instead of k.

Invariants (the tests assert them):
- a rank receives, once, each number that its new plan needs and it does not hold, and no others;
- a sender holds the box or relays it; if it relays it, an earlier route of the same box has this
  sender as a destination;
- a sender is on the receiver's node if a holder is; from another node every number comes to one
  rank of the node. Of several candidates the one with the least to send so far is taken, so that
  replicas share the load;
- relays inside a node with a holder, or from node to node, are used only if they reduce the load
  of the busiest sender;
- the same arguments give the same table, on every rank of a job.

Sizes count numbers (tensor elements), not bytes.
"""

import itertools
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from math import prod

from puzzle_align.layout.holdings import Holdings
from puzzle_align.layout.rules import Box, extents, overlap

# Least numbers in a part of a broadcast box. The two copies of a route, out of one model and into
# another, take much the same time up to this size: on a CPU 23 us for 2**12 numbers and 33 us for
# 2**16, but 121 us for 2**18.
MIN_PART = 2**16

# Weight in the load of a number sent between nodes; inside a node it is 1: a network card per rank
# has about a tenth of NVLink's bandwidth.
_FAR = 10

_ONE_NODE = sys.maxsize  # ranks per node if all ranks are on one node

# Load of a sender, relative to the busiest receiver's, above which broadcasts relieve it. Sending
# and receiving overlap, so up to 1 is free; a little more is not worth routes of more hops.
_BUSY = 1.25


@dataclass(frozen=True, slots=True)
class Route:
    """A box of a Hugging Face tensor, from one rank to one or more others.

    ``relayed``: the source does not hold the box, but received it by an earlier route.
    """

    tensor: str
    box: Box
    source: int
    destinations: tuple[int, ...]
    relayed: bool = False

    @property
    def size(self) -> int:
        """Numbers that each destination receives."""
        return prod(extents(self.box))


@dataclass(frozen=True, slots=True)
class Kept:
    """A box that ranks need and already hold."""

    tensor: str
    box: Box
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class RoutingTable:
    """All boxes that move and all that stay, in the model's order of tensors."""

    routes: tuple[Route, ...]
    kept: tuple[Kept, ...]

    def of(self, is_wanted: Callable[[str], bool]) -> "RoutingTable":
        """The part of the table with some of the tensors."""
        routes = tuple(route for route in self.routes if is_wanted(route.tensor))
        return RoutingTable(routes, tuple(box for box in self.kept if is_wanted(box.tensor)))

    @property
    def links(self) -> Counter[tuple[int, int]]:
        """Numbers sent by (source, destination)."""
        numbers_on: Counter[tuple[int, int]] = Counter()
        for route in self.routes:
            for destination in route.destinations:
                numbers_on[route.source, destination] += route.size
        return numbers_on

    @property
    def sent(self) -> Counter[int]:
        """Numbers that every rank sends; a number sent to two ranks counts twice."""
        numbers_by: Counter[int] = Counter()
        for (source, _), size in self.links.items():
            numbers_by[source] += size
        return numbers_by

    @property
    def received(self) -> Counter[int]:
        """Numbers that every rank receives."""
        numbers_by: Counter[int] = Counter()
        for (_, receiver), size in self.links.items():
            numbers_by[receiver] += size
        return numbers_by


@dataclass(frozen=True, slots=True)
class _Cell:
    """An intersection of one box of the source with one box of the destination."""

    tensor: str
    box: Box
    holders: tuple[int, ...]
    wanted: tuple[int, ...]
    kept: tuple[int, ...]  # the ranks of ``wanted`` that already have the box

    @property
    def size(self) -> int:
        return prod(extents(self.box))


@dataclass(frozen=True)
class _Load:
    """Load of the ranks so far; a number sent between nodes weighs more."""

    ranks_per_node: int
    sends: Counter[int] = field(default_factory=Counter)
    receives: Counter[int] = field(default_factory=Counter)

    def node(self, rank: int) -> int:
        return rank // self.ranks_per_node

    def add(self, source: int, destinations: Sequence[int], size: int) -> None:
        per_node, receives = self.ranks_per_node, self.receives
        source_node, sent = source // per_node, 0
        for destination in destinations:
            weight = size if destination // per_node == source_node else _FAR * size
            receives[destination] += weight
            sent += weight
        self.sends[source] += sent

    def least(self, ranks: tuple[int, ...]) -> int:
        """The rank with the least to send so far; the first of equal ones."""
        return ranks[0] if len(ranks) == 1 else min(ranks, key=self.sends.__getitem__)

    def senders(
        self, holders: tuple[int, ...], wanted: tuple[int, ...], kept: tuple[int, ...]
    ) -> list[tuple[tuple[int, ...], list[tuple[int, ...]]]]:
        """Possible senders of a cell, each set with groups of receivers, in order of ranks.

        The receivers on a node without a holder form one group; on a node with a holder, each
        receiver is a group.
        """
        missing = self._by_node(rank for rank in wanted if rank not in kept)
        near = self._by_node(holders) if missing else {}
        possible = [
            (near[node], [(rank,) for rank in receivers])
            for node, receivers in missing.items()
            if node in near
        ]
        far = [receivers for node, receivers in missing.items() if node not in near]
        return [*possible, (tuple(sorted(holders)), far)] if far else possible

    def _by_node(self, ranks: Iterable[int]) -> dict[int, tuple[int, ...]]:
        """The given ranks of each node, in order."""
        return {
            node: tuple(node_ranks)
            for node, node_ranks in itertools.groupby(sorted(ranks), self.node)
        }

    @property
    def most_sent(self) -> int:
        return max(self.sends.values(), default=0)

    def busy(self) -> frozenset[int]:
        """Senders with too much load, relative to the busiest receiver."""
        limit = _BUSY * max(self.receives.values(), default=0)
        return frozenset(rank for rank, size in self.sends.items() if size > limit)


# Destinations by (box, source, whether relayed). A relay comes after the route that it relays.
_Ways = dict[tuple[Box, int, bool], list[int]]


def routing_table(
    source: Holdings,
    destination: Holdings,
    *,
    ranks_per_node: int | None = None,
    max_size: int | None = None,
    min_part: int = MIN_PART,
    resident: Holdings | None = None,
) -> RoutingTable:
    """Transfers that give the destination's ranks their weights from the source's.

    Args:
        source, destination: holdings of one model, on the same, overlapping or disjoint ranks.
        ranks_per_node: node n has the ranks from ``n * ranks_per_node`` on; None: one node.
        max_size: most numbers of a route, unless one row of its box (first dimension) has more.
        min_part: least numbers in a part of a broadcast box; a smaller box is relayed whole, by
            one of the ranks.
        resident: boxes that ranks hold already and that are not sent to them; None: the source's.
            Its boxes are unions of the source's, as a model's are of its optimizer's shards.
    """
    assert source.model == destination.model, "the models differ"
    whole = _cells(source, destination, resident or source)
    cells = [part for cell in whole for part in _parts(cell, max_size)]
    per_node = _ONE_NODE if ranks_per_node is None else ranks_per_node
    load = _Load(per_node)
    ways = _ways(cells, load, min_part, frozenset())
    busy = load.busy()
    if busy:
        other = _Load(per_node)
        relieved = _ways(cells, other, min_part, busy)
        if other.most_sent < load.most_sent:
            ways = relieved
    routes: list[Route] = []
    kept: list[Kept] = []
    for cell, way in zip(cells, ways, strict=True):
        if cell.kept:
            kept.append(Kept(cell.tensor, cell.box, cell.kept))
        for (box, rank, relayed), receivers in way.items():
            routes.append(Route(cell.tensor, box, rank, tuple(sorted(receivers)), relayed))
    return RoutingTable(tuple(routes), tuple(kept))


@dataclass(frozen=True, slots=True)
class Arrival:
    """Numbers of a tensor that each of some ranks of a node must receive, from any sender.

    ``near``: the senders are on their node; otherwise one of the ranks receives each number from
    another node.
    """

    tensor: str
    ranks: tuple[int, ...]
    size: int
    near: bool


def arrivals(
    source: Holdings, destination: Holdings, *, ranks_per_node: int | None = None
) -> Iterator[Arrival]:
    """Arrivals that are the same in every routing table of these arguments."""
    load = _Load(_ONE_NODE if ranks_per_node is None else ranks_per_node)
    senders = cache(load.senders)
    for cell in _cells(source, destination, source):
        for holders, groups in senders(cell.holders, cell.wanted, cell.kept):
            near = load.node(holders[0]) == load.node(groups[0][0])
            for ranks in groups:
                yield Arrival(cell.tensor, ranks, cell.size, near)


def lower_bound(source: Holdings, destination: Holdings) -> dict[int, int]:
    """Numbers that each destination rank must receive: its part without those that it holds.

    No table has less (PUZZLE, section 5.2: the communication volume).
    """
    received = dict.fromkeys(destination.ranks, 0)
    for arrival in arrivals(source, destination):
        for rank in arrival.ranks:
            received[rank] += arrival.size
    return received


def _cells(source: Holdings, destination: Holdings, resident: Holdings) -> Iterator[_Cell]:
    for tensor, wanted in destination.holders.items():
        for box, ranks in wanted.items():
            for held, holders in source.holders[tensor].items():
                common = overlap(box, held)
                if common is not None:
                    holders_here = holders
                    if resident is not source:
                        holders_here = _all_of(common, resident.holders[tensor])
                    kept = tuple(rank for rank in ranks if rank in holders_here)
                    yield _Cell(tensor, common, holders, ranks, kept)


def _all_of(box: Box, holders: Mapping[Box, tuple[int, ...]]) -> tuple[int, ...]:
    """Ranks that have the whole of a box."""
    return next(ranks for held, ranks in holders.items() if overlap(box, held) == box)


def _parts(cell: _Cell, max_size: int | None) -> Iterator[_Cell]:
    """The cell, cut along its first dimension into parts of at most ``max_size``."""
    if max_size is None:
        yield cell
        return
    (start, end), *rest = cell.box
    row = cell.size // (end - start)
    rows = max(1, max_size // row)
    for first in range(start, end, rows):
        box = ((first, min(first + rows, end)), *rest)
        yield replace(cell, box=box)


def _ways(cells: list[_Cell], load: _Load, min_part: int, relieved: frozenset[int]) -> list[_Ways]:
    """Ways of the cells, added to the load; the largest, hardest to balance, are placed first.

    ``relieved`` are holders that send a box once and let a receiver relay it to all others.
    """
    ways: list[_Ways] = [{} for _ in cells]
    senders = cache(load.senders)  # many tensors are cut alike
    for number in sorted(range(len(cells)), key=lambda n: -cells[n].size):
        cell = cells[number]
        for holders, nodes in senders(cell.holders, cell.wanted, cell.kept):
            together = not relieved.isdisjoint(holders)
            for each in [nodes] if together else [[node] for node in nodes]:
                for box, size in _cut(cell, sum(map(len, each)), min_part):
                    _broadcast(box, size, holders, each, load, ways[number])
    return ways


def _cut(cell: _Cell, num_parts: int, min_part: int) -> list[tuple[Box, int]]:
    """Parts of the cell's box with sizes: ``num_parts``, or fewer if they would be too small."""
    (start, end), *rest = cell.box
    rows, size = end - start, cell.size
    num_parts = max(1, min(num_parts, rows, size // min_part))
    cuts = [start + rows * number // num_parts for number in range(num_parts + 1)]
    return [
        (((first, last), *rest), size // rows * (last - first))
        for first, last in itertools.pairwise(cuts)
    ]


def _broadcast(
    box: Box,
    size: int,
    holders: tuple[int, ...],
    groups: list[tuple[int, ...]],
    load: _Load,
    ways: _Ways,
) -> None:
    """Route a box to one receiver, from there to one of every other group, then inside groups."""

    def send(source: int, receivers: list[int], *, relayed: bool) -> None:
        ways.setdefault((box, source, relayed), []).extend(receivers)
        load.add(source, receivers, size)

    first = load.least(tuple(itertools.chain(*groups)))
    send(load.least(holders), [first], relayed=False)
    heads = [load.least(group) for group in groups]  # one of them is ``first``
    if len(groups) > 1:
        send(first, [head for head in heads if head != first], relayed=True)
    for group, head in zip(groups, heads, strict=True):
        if len(group) > 1:
            send(head, [rank for rank in group if rank != head], relayed=True)
