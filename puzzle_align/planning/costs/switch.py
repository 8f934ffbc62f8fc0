"""Seconds of a switch of plans: the routing table's bytes on measured or declared links.

Boxes that a rank already has are copied if the plans differ in tensor size; else the new plan's
parameters share their memory (``Shards.share``). A model with adapters moves these alone: the first
switch, which also moves the base, is not counted.
"""

from collections import Counter, defaultdict
from functools import lru_cache, partial
from math import prod
from typing import NamedTuple

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


class _Work(NamedTuple):
    """Boxes that a rank sends, or receives, and that it copies."""

    network: _Boxes
    node: _Boxes
    copied: _Boxes
    at_once: float  # ranks of its node that send, or receive, as much as this one between nodes


def switch_seconds(links: LinkCosts, trained: ContextPlan, sampling: ContextPlan) -> float:
    """Seconds until every sampling rank has its weights; 0 if both plans are the same.

    A rank sends and receives at the same time, but does copies, traffic within its node and between
    nodes in sequence. The switch takes the busiest rank's time. A share of a tensor's box costs
    this share of the box's time: on a CPU a large one takes longer a byte, as its memory is new.
    """
    before, after = trained.placed, sampling.placed
    if before == after:
        return 0.0
    element = BYTES_PER_PARAMETER[trained.options.dtype]

    def seconds(work: _Work) -> float:
        moved = sum(
            n * links.exchange("network", size * element, work.at_once) for size, n in work.network
        )
        moved += sum(n * links.exchange("node", size * element) for size, n in work.node)
        return moved + sum(n * links.copy(size * element) for size, n in work.copied)

    busiest = _busiest(trained.model, before, after, links.ranks_per_node)
    return max(map(seconds, busiest), default=0.0)


def received_seconds(links: LinkCosts, trained: ContextPlan, sampling: ContextPlan) -> float:
    """Lower bound of ``switch_seconds``, mostly close: received numbers alone, without routing."""
    before, after = trained.placed, sampling.placed
    if before == after:
        return 0.0
    element = BYTES_PER_PARAMETER[trained.options.dtype]
    received = _received(trained.model, before, after, links.ranks_per_node)
    near = element * links.least_exchange("node") if any(near for near, _ in received) else 0.0
    far = element * links.least_exchange("network") if any(far for _, far in received) else 0.0
    return max((near * one + far * other for one, other in received), default=0.0)


@lru_cache(maxsize=4096)
def _received(
    model: ModelSpec, before: Placed, after: Placed, ranks_per_node: int
) -> frozenset[tuple[float, float]]:
    """Numbers received from the rank's node and from others, per rank and per node in the mean.

    Which of several ranks of a node receives a shared number from another node is open before
    routing. The ranks' figures leave such numbers out; the node's mean has them exactly, and its
    busiest rank is not below the mean.
    """
    runs, source, destination = _sides(model, before, after)
    by_rank = {rank: [0, 0] for rank in after[1]}
    together: dict[int, list[int]] = {rank // ranks_per_node: [0, 0] for rank in after[1]}
    for arrival in arrivals(source, destination, ranks_per_node=ranks_per_node):
        if not is_moved(model, arrival.tensor):
            continue
        numbers, ranks = arrival.size * runs.times(arrival.tensor), arrival.ranks
        from_others = 0 if arrival.near else 1
        whole = together[ranks[0] // ranks_per_node]
        whole[0] += numbers * (len(ranks) - from_others)
        whole[1] += numbers * from_others
        if len(ranks) == 1:
            by_rank[ranks[0]][from_others] += numbers
    sizes = Counter(rank // ranks_per_node for rank in after[1])
    means = {(near / sizes[node], far / sizes[node]) for node, (near, far) in together.items()}
    return frozenset(means | {(near, far) for near, far in by_rank.values()})


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

    Received numbers are exact. Replicas share sends less evenly here than in the whole model's
    table: for large models the busiest sends at most a tenth more.
    """
    runs, source, destination = _sides(model, before, after)
    table = routing_table(source, destination, ranks_per_node=ranks_per_node)
    table = table.of(partial(is_moved, model))
    wanted = {  # numbers of a tensor's box; ranks differ by little
        name: prod(extents(next(iter(boxes)))) for name, boxes in destination.holders.items()
    }
    works: dict[tuple[str, Place, int], Counter[int]] = defaultdict(Counter)  # numbers by box size
    for route in table.routes:
        node, numbers = route.source // ranks_per_node, route.size * runs.times(route.tensor)
        for receiver in route.destinations:
            place: Place = "node" if node == receiver // ranks_per_node else "network"
            works["sent", place, route.source][wanted[route.tensor]] += numbers
            works["received", place, receiver][wanted[route.tensor]] += numbers
    for kept in table.kept if before[0].tensor != after[0].tensor else ():
        numbers = prod(extents(kept.box)) * runs.times(kept.tensor)
        for rank in kept.ranks:
            works["copied", "node", rank][wanted[kept.tensor]] += numbers
    boxes = {
        key: tuple((size, numbers / size) for size, numbers in sorted(by_size.items()))
        for key, by_size in works.items()
    }
    far = {
        (side, rank): n.total() for (side, place, rank), n in works.items() if place == "network"
    }
    nodes: Counter[tuple[str, int]] = Counter()
    for (side, rank), numbers in far.items():
        nodes[side, rank // ranks_per_node] += numbers
    return frozenset(
        _Work(
            boxes.get((side, "network", rank), ()),
            boxes.get((side, "node", rank), ()),
            boxes.get(("copied", "node", rank), ()),
            nodes[side, rank // ranks_per_node] / max(1, far.get((side, rank), 0)),
        )
        for side in ("sent", "received")
        for rank in {*before[1], *after[1]}
    )
