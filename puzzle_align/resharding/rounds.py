"""A routing table in rounds, so that no rank holds more than a bucket of data in transit.

Invariants (the tests assert them):
- every route is in one round; what a rank sends in a round, each route once, is at most a bucket,
  and so is what it receives;
- a rank relays only boxes received in an earlier round: relays of a bucket run beside the holders'
  next sends;
- routes of one source to the same destinations are one message of a round.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from puzzle_align.layout.rules import Box
from puzzle_align.resharding.routing import Route


@dataclass(frozen=True)
class Message:
    """One rank's message to others in a round: the routes' boxes behind each other."""

    source: int
    destinations: tuple[int, ...]
    routes: tuple[Route, ...]

    @property
    def size(self) -> int:
        """Numbers in the message."""
        return sum(route.size for route in self.routes)


def rounds(routes: Sequence[Route], bucket_size: int) -> list[list[Message]]:
    """The routes' messages, round by round, each in the earliest that has room for it.

    Args:
        routes: a table's, in its order, in which relays are behind what they relay.
        bucket_size: numbers that a rank may have to send, and to receive, in a round; no route has
            more (``routing_table``'s ``max_size``).
    """
    used: dict[tuple[str, int], list[int]] = defaultdict(list)  # by side and rank: of every round
    first: dict[tuple[str, int], int] = defaultdict(int)  # the first round that is not full
    arrived: dict[tuple[str, Box, int], int] = {}  # by box and rank: in which round
    placed: list[dict[tuple[int, tuple[int, ...]], list[Route]]] = []
    for route in routes:
        assert route.size <= bucket_size, f"{route} is larger than a bucket of {bucket_size}"
        sides = [("sends", route.source), *(("receives", to) for to in route.destinations)]
        number = max(first[side] for side in sides)
        if route.relayed:
            number = max(number, 1 + arrived[route.tensor, route.box, route.source])
        while any(_at(used[side], number) + route.size > bucket_size for side in sides):
            number += 1
        for side in sides:
            used[side] += [0] * (number + 1 - len(used[side]))
            used[side][number] += route.size
            while _at(used[side], first[side]) == bucket_size:
                first[side] += 1
        arrived |= {(route.tensor, route.box, to): number for to in route.destinations}
        placed += [{} for _ in range(number + 1 - len(placed))]
        placed[number].setdefault((route.source, route.destinations), []).append(route)
    return [
        [Message(*ends, tuple(together)) for ends, together in sorted(messages.items())]
        for messages in placed
    ]


def _at(sizes: list[int], number: int) -> int:
    return sizes[number] if number < len(sizes) else 0
