"""What ranks take to talk to each other, from a profile's measured or declared links.

A group of ranks talks within a node where all its ranks are on one, else between nodes. Where no
group of so many ranks was measured, the nearest is taken, in proportion to what a ring sends.
"""

from collections.abc import Sequence
from functools import cache

from puzzle_align.planning.interpolate import Estimate, Line
from puzzle_align.planning.profile import Link, Place, Transport

_DEPENDS_ON_RANKS = ("all_reduce", "all_gather")


class MissingLink(ValueError):
    """A link that the profile does not have."""


class LinkCosts:
    """Seconds of messages; ``beyond`` collects what was not measured and was estimated."""

    def __init__(self, links: Sequence[Link], ranks_per_node: int) -> None:
        self._lines: dict[tuple[Transport, Place], dict[int, Line]] = {}
        for link in links:
            line = Line((point.size, point.time.median) for point in link.points)
            self._lines.setdefault((link.transport, link.place), {})[link.ranks] = line
        self.ranks_per_node = ranks_per_node
        self.beyond: set[str] = set()
        self._seconds = cache(self._estimated)

    def place(self, ranks: Sequence[int]) -> Place:
        """Where a group of global ranks talks."""
        size = self.ranks_per_node
        return "node" if min(ranks) // size == max(ranks) // size else "network"

    def p2p(self, source: int, destination: int, size: float) -> float:
        """Seconds of ``size`` bytes from a rank to another."""
        per_node = self.ranks_per_node
        place: Place = "node" if source // per_node == destination // per_node else "network"
        return self._seconds("p2p", place, 2, size)

    def least_p2p(self, place: Place) -> float:
        """Seconds that a byte from a rank to another there takes at least, in whatever message."""
        return min(line.least_each for line in self._of("p2p", place).values())

    def all_reduce(self, ranks: Sequence[int], size: float) -> float:
        """Seconds of the sum of ``size`` bytes over ranks; 0 for one of them."""
        if len(ranks) < 2 or size <= 0:
            return 0.0
        return self._seconds("all_reduce", self.place(ranks), len(ranks), size)

    def all_gather(self, ranks: Sequence[int], size: float) -> float:
        """Seconds until every rank has all of ``size`` bytes, of which each had a part.

        A reduce-scatter sends as much the other way.
        """
        if len(ranks) < 2 or size <= 0:
            return 0.0
        return self._seconds("all_gather", self.place(ranks), len(ranks), size)

    def _estimated(self, transport: Transport, place: Place, ranks: int, size: float) -> float:
        lines = self._of(transport, place)
        nearest = min(lines, key=lambda number: (abs(number - ranks), number))
        found: Estimate = lines[nearest].at(size)
        scale = 1.0
        if nearest != ranks and transport in _DEPENDS_ON_RANKS:
            scale = _ring(ranks) / _ring(nearest)
            self.beyond.add(f"{transport} of {ranks} ranks, from that of {nearest}")
        return found.value * scale

    def _of(self, transport: Transport, place: Place) -> dict[int, Line]:
        """What was measured, by the number of ranks."""
        lines = self._lines.get((transport, place))
        if not lines:
            where = "within a node" if place == "node" else "between nodes"
            raise MissingLink(
                f"the profile has no {transport} {where}: measure it there, or declare it with "
                "launch/profile.py --links"
            )
        return lines


class FastestLinks(LinkCosts):
    """Every message takes what it would where it is fastest."""

    def _estimated(self, transport: Transport, place: Place, ranks: int, size: float) -> float:
        places: list[Place] = [own for kind, own in self._lines if kind == transport] or [place]
        return min(super(FastestLinks, self)._estimated(transport, p, ranks, size) for p in places)


def _ring(ranks: int) -> float:
    """What each rank of a ring sends, in relation to the message."""
    return (ranks - 1) / ranks
