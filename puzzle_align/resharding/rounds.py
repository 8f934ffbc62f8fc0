"""Rounds of a routing table: no rank holds more than a bucket of data in transit.

Invariants (the tests assert them):
- every route is in one round; a rank sends at most a bucket in a round, counting each route once,
  and receives at most a bucket;
- a rank relays only boxes received in an earlier round: relays of one bucket overlap the holders'
  sends of the next;
- routes from one source to the same destinations form one message of a round.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from puzzle_align.layout.rules import Box
from puzzle_align.resharding.routing import Route


@dataclass(frozen=True)
class Message:
    """One rank's message to others in a round: the boxes of its routes, concatenated."""

    source: int
    destinations: tuple[int, ...]
    routes: tuple[Route, ...]


def rounds(routes: Sequence[Route], bucket_size: int) -> list[list[Message]]:
    """Messages of every round; each route is in the earliest round with room for it.

    Args:
        routes: a table's, in its order: a relay comes after the route that it relays.
        bucket_size: most numbers that a rank sends, and receives, in a round; no route has more
            (``routing_table``'s ``max_size``).
    """
    used: dict[tuple[str, int], list[int]] = defaultdict(list)  # by side and rank: of every round
    first: dict[tuple[str, int], int] = defaultdict(int)  # the first round that is not full
    arrived: dict[tuple[str, Box, int], int] = {}  # by box and rank: its round
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
