"""Which rank sends which box of which tensor to whom, when a model moves between two plans.

Invariants (the tests assert them):
- a rank receives what it wants and does not hold, every number of it once, and nothing else;
- the sender holds what it sends. It is on the receiver's node where one of the holders is; of
  several it is the one with the least to send so far, so that replicas share the load;
- the same arguments give the same table, on every rank of a job.

Sizes are counted in numbers (elements): how many bytes one has is the reader's to say.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from puzzle_align.layout.holdings import Holdings
from puzzle_align.layout.rules import Box, extents, overlap


@dataclass(frozen=True, slots=True)
class Route:
    """A box of a Hugging Face tensor, from one rank to one or more others."""

    tensor: str
    box: Box
    source: int
    destinations: tuple[int, ...]

    @property
    def size(self) -> int:
        """Numbers that each destination receives."""
        return prod(extents(self.box))


@dataclass(frozen=True, slots=True)
class Kept:
    """A box that ranks want and hold already."""

    tensor: str
    box: Box
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class RoutingTable:
    """All that moves, and all that need not, in the model's order of tensors."""

    routes: tuple[Route, ...]
    kept: tuple[Kept, ...]

    @property
    def links(self) -> Counter[tuple[int, int]]:
        """Numbers that go from one rank to another, by (source, destination)."""
        found: Counter[tuple[int, int]] = Counter()
        for route in self.routes:
            for destination in route.destinations:
                found[route.source, destination] += route.size
        return found

    @property
    def sent(self) -> Counter[int]:
        """Numbers that every rank sends; what goes to two ranks counts twice."""
        found: Counter[int] = Counter()
        for (source, _), size in self.links.items():
            found[source] += size
        return found

    @property
    def received(self) -> Counter[int]:
        """Numbers that every rank receives."""
        found: Counter[int] = Counter()
        for (_, destination), size in self.links.items():
            found[destination] += size
        return found


@dataclass(frozen=True, slots=True)
class _Cell:
    """A box that lies whole in one box of the source and in one of the destination."""

    tensor: str
    box: Box
    holders: tuple[int, ...]
    wanted: tuple[int, ...]

    @property
    def size(self) -> int:
        return prod(extents(self.box))


def routing_table(
    source: Holdings,
    destination: Holdings,
    *,
    ranks_per_node: int | None = None,
    max_size: int | None = None,
) -> RoutingTable:
    """How the destination's ranks get their weights from the source's.

    Args:
        source, destination: of one model, on ranks that are the same, overlap or have nothing in
            common.
        ranks_per_node: ranks ``n * ranks_per_node`` and on are node n's; None: there is one node.
        max_size: a route's numbers at most, where its box has a first dimension to cut.
    """
    assert source.model == destination.model, "the models differ"
    cells = [part for cell in _cells(source, destination) for part in _parts(cell, max_size)]
    senders = _senders(cells, ranks_per_node)
    routes: list[Route] = []
    kept: list[Kept] = []
    for cell, by_source in zip(cells, senders, strict=True):
        own = tuple(rank for rank in cell.wanted if rank in cell.holders)
        if own:
            kept.append(Kept(cell.tensor, cell.box, own))
        for rank, receivers in sorted(by_source.items()):
            routes.append(Route(cell.tensor, cell.box, rank, tuple(receivers)))
    return RoutingTable(tuple(routes), tuple(kept))


def lower_bound(source: Holdings, destination: Holdings) -> dict[int, int]:
    """Numbers that each destination rank must receive, whoever sends: its own less those it holds.

    No table can do with less (PUZZLE, section 5.2: the communication volume).
    """
    found = dict.fromkeys(destination.ranks, 0)
    for cell in _cells(source, destination):
        for rank in cell.wanted:
            found[rank] += cell.size * (rank not in cell.holders)
    return found


def _cells(source: Holdings, destination: Holdings) -> Iterator[_Cell]:
    for tensor, wanted in destination.holders.items():
        for box, ranks in wanted.items():
            for held, holders in source.holders[tensor].items():
                common = overlap(box, held)
                if common is not None:
                    yield _Cell(tensor, common, holders, ranks)


def _parts(cell: _Cell, max_size: int | None) -> Iterator[_Cell]:
    """The cell, cut along its first dimension into parts of at most ``max_size``."""
    (start, end), *rest = cell.box
    row = max(1, cell.size // (end - start))
    rows = end - start if max_size is None else max(1, max_size // row)
    for first in range(start, end, rows):
        box = ((first, min(first + rows, end)), *rest)
        yield _Cell(cell.tensor, box, cell.holders, cell.wanted)


def _senders(cells: list[_Cell], ranks_per_node: int | None) -> list[dict[int, list[int]]]:
    """By cell, the receivers of every sender: the largest cells first, which balance worst."""
    load: Counter[int] = Counter()
    found: list[dict[int, list[int]]] = [{} for _ in cells]
    for number in sorted(range(len(cells)), key=lambda n: -cells[n].size):
        cell = cells[number]
        for receiver in cell.wanted:
            if receiver in cell.holders:
                continue
            near = _on_node(cell.holders, receiver, ranks_per_node)
            sender = min(near or cell.holders, key=lambda rank: (load[rank], rank))
            load[sender] += cell.size
            found[number].setdefault(sender, []).append(receiver)
    return found


def _on_node(ranks: tuple[int, ...], receiver: int, ranks_per_node: int | None) -> tuple[int, ...]:
    """Those of the ranks that are on the receiver's node."""
    if ranks_per_node is None:
        return ranks
    return tuple(rank for rank in ranks if rank // ranks_per_node == receiver // ranks_per_node)
