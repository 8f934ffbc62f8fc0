"""Seconds of a switch of plans: the routing table's bytes on measured or declared links.

Boxes that a rank already has are copied if the plans differ in tensor size; else the new plan's
parameters share their memory (``Shards.share``). A model with adapters moves these alone: the first
switch, which also moves the base, is not counted.
"""

from collections import Counter, defaultdict
from functools import lru_cache, partial
from itertools import groupby
from math import prod
from operator import attrgetter
from typing import Literal, NamedTuple

from puzzle_align.layout.holdings import Holdings
from puzzle_align.layout.job_plan import ContextPlan, Placed
from puzzle_align.layout.model import BYTES_PER_PARAMETER, ModelSpec
from puzzle_align.layout.rank_order import LayerRuns, layer_runs
from puzzle_align.layout.rules import extents
from puzzle_align.layout.weights import is_moved
from puzzle_align.planning.costs.links import LinkCosts
from puzzle_align.planning.costs.profile import Place
from puzzle_align.resharding.routing import arrivals, routing_table

# Size of the tensors' boxes at their destination, and how many such boxes' numbers move.
_Boxes = tuple[tuple[int, float], ...]
_Side = Literal["sent", "received"]


class _Moved(NamedTuple):
    """Boxes that a rank sends, or receives, in one place."""

    side: _Side
    place: Place
    relayed: bool  # by a rank that received them
    boxes: _Boxes
    at_once: float  # ranks of its node that send, or receive, as much as this one between nodes


class _Work(NamedTuple):
    """Boxes of a rank."""

    moved: tuple[_Moved, ...]
    copied: _Boxes


def switch_seconds(links: LinkCosts, trained: ContextPlan, sampling: ContextPlan) -> float:
    """Seconds until every sampling rank has its weights; 0 if both plans are the same.

    A rank copies, then sends and receives, within its node and between nodes at once, and then
    relays. (So it is if a round has room for all; with many rounds, relays of one overlap the next,
    but the rounds' parts are less even.) The switch takes the busiest rank's time. A share of a
    tensor's box costs this share of the box's time: on a CPU a large one takes longer a byte, as
    its memory is new.
    """
    before, after = trained.placed, sampling.placed
    if before == after:
        return 0.0
    element = BYTES_PER_PARAMETER[trained.options.dtype]

    def seconds(work: _Work) -> float:
        direct, relayed = [0.0], {"sent": 0.0, "received": 0.0}
        for side, place, is_relayed, boxes, at_once in work.moved:
            took = sum(n * links.exchange(place, size * element, at_once) for size, n in boxes)
            if is_relayed:
                relayed[side] += took
            else:
                direct.append(took)
        copied = sum(n * links.copy(size * element) for size, n in work.copied)
        return copied + max(direct) + max(relayed.values())

    return max(map(seconds, _busiest(trained.model, before, after, links.ranks_per_node)))


def received_seconds(links: LinkCosts, trained: ContextPlan, sampling: ContextPlan) -> float:
    """Lower bound of ``switch_seconds``, mostly close: received numbers alone, without routing."""
    before, after = trained.placed, sampling.placed
    if before == after:
        return 0.0
    element = BYTES_PER_PARAMETER[trained.options.dtype]
    received = _received(trained.model, before, after, links.ranks_per_node)
    near = element * links.least_exchange("node") if any(n or r for n, _, r in received) else 0.0
    far = element * links.least_exchange("network") if any(f for _, f, _ in received) else 0.0
    return max(max(near * n, far * f) + near * r for n, f, r in received)


@lru_cache(maxsize=4096)
def _received(
    model: ModelSpec, before: Placed, after: Placed, ranks_per_node: int
) -> frozenset[tuple[float, float, float]]:
    """Numbers received from holders on the node, from other nodes, and from relays on the node.

    Which of several ranks of a node receives a shared number from another node is open before
    routing. The ranks' figures leave such numbers out; the node's mean has them exactly, and its
    busiest rank is not below the mean.
    """
    runs, source, destination = _sides(model, before, after)
    by_rank = {rank: [0, 0] for rank in after[1]}
    together: dict[int, list[int]] = {rank // ranks_per_node: [0, 0, 0] for rank in after[1]}
    for arrival in arrivals(source, destination, ranks_per_node=ranks_per_node):
        if not is_moved(model, arrival.tensor):
            continue
        numbers, ranks = arrival.size * runs.times(arrival.tensor), arrival.ranks
        whole = together[ranks[0] // ranks_per_node]
        if arrival.near:
            whole[0] += numbers * len(ranks)
        else:
            whole[1] += numbers
            whole[2] += numbers * (len(ranks) - 1)
        if len(ranks) == 1:
            by_rank[ranks[0]][not arrival.near] += numbers
    sizes = Counter(rank // ranks_per_node for rank in after[1])
    means = [[number / sizes[node] for number in whole] for node, whole in together.items()]
    alone = [(near, far, 0) for near, far in by_rank.values()]
    return frozenset((near, far, relayed) for near, far, relayed in (*means, *alone))


def _sides(model: ModelSpec, before: Placed, after: Placed) -> tuple[LayerRuns, Holdings, Holdings]:
    """Layer runs, and the holdings of one layer of each before and after."""
    runs = layer_runs(model, before[0], after[0])
    source = Holdings(runs.model, runs.before, before[1])
    return runs, source, Holdings(runs.model, runs.after, after[1])


@lru_cache(maxsize=4096)
def _busiest(
    model: ModelSpec, before: Placed, after: Placed, ranks_per_node: int
) -> frozenset[_Work]:
    """Numbers that ranks receive or send, and copy; only one layer of every run is routed.

    Received numbers are exact. Replicas share the rest less evenly here than in the whole model's
    table, by which a large model's time is mostly within a tenth of this, at worst a third less.
    """
    runs, source, destination = _sides(model, before, after)
    table = routing_table(source, destination, ranks_per_node=ranks_per_node)
    table = table.of(partial(is_moved, model))
    wanted = {  # numbers of a tensor's box; ranks differ by little
        name: prod(extents(next(iter(boxes)))) for name, boxes in destination.holders.items()
    }
    # Numbers by the size of a box.
    copied: dict[int, Counter[int]] = defaultdict(Counter)
    moved: dict[tuple[_Side, Place, bool, int], Counter[int]] = defaultdict(Counter)
    between: Counter[tuple[_Side, int]] = Counter()  # nodes: numbers by side and rank
    for tensor, routes in groupby(table.routes, key=attrgetter("tensor")):
        times, box = runs.times(tensor), wanted[tensor]
        for route in routes:
            node, numbers = route.source // ranks_per_node, route.size * times
            for receiver in route.destinations:
                place: Place = "node" if node == receiver // ranks_per_node else "network"
                moved["sent", place, route.relayed, route.source][box] += numbers
                moved["received", place, route.relayed, receiver][box] += numbers
                if place == "network":
                    between["sent", route.source] += numbers
                    between["received", receiver] += numbers
    for kept in table.kept if before[0].tensor != after[0].tensor else ():
        numbers = prod(extents(kept.box)) * runs.times(kept.tensor)
        for rank in kept.ranks:
            copied[rank][wanted[kept.tensor]] += numbers
    nodes: Counter[tuple[_Side, int]] = Counter()
    for (side, rank), numbers in between.items():
        nodes[side, rank // ranks_per_node] += numbers
    works: dict[int, list[_Moved]] = defaultdict(list)
    for (side, place, relayed, rank), by_size in moved.items():
        at_once = nodes[side, rank // ranks_per_node] / max(1, between[side, rank])
        works[rank].append(_Moved(side, place, relayed, _boxes(by_size), at_once))
    return frozenset(
        _Work(tuple(works[rank]), _boxes(copied[rank])) for rank in {*before[1], *after[1]}
    )


def _boxes(numbers: Counter[int]) -> _Boxes:
    return tuple((size, number / size) for size, number in sorted(numbers.items()))
