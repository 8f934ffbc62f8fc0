"""Seconds of a switch of plans: the real routing table's bytes on measured or declared links."""

from collections import Counter
from functools import lru_cache

from puzzle_align.layout.holdings import Holdings
from puzzle_align.layout.job_plan import ContextPlan
from puzzle_align.layout.model import BYTES_PER_PARAMETER, ModelSpec
from puzzle_align.layout.plan import ParallelPlan
from puzzle_align.layout.rank_order import LayerRuns, layer_runs
from puzzle_align.planning.costs.links import LinkCosts
from puzzle_align.planning.costs.profile import Place
from puzzle_align.resharding.routing import arrivals, routing_table

_Side = tuple[tuple[Place, int], ...]  # numbers that a rank sends, or receives, by place


def switch_seconds(links: LinkCosts, trained: ContextPlan, sampling: ContextPlan) -> float:
    """Seconds until every rank that samples has its weights; 0 where both plans are one.

    A rank receives and sends at the same time, within its node and between nodes one after the
    other; the busiest rank's time is the switch's.
    """
    before, after = (trained.plan, trained.ranks), (sampling.plan, sampling.ranks)
    if before == after:
        return 0.0
    element = BYTES_PER_PARAMETER[trained.options.dtype]
    busiest = _busiest(trained.model, before, after, links.ranks_per_node)
    return max(
        (sum(_seconds(links, place, n * element) for place, n in side) for side in busiest),
        default=0.0,
    )


def received_seconds(links: LinkCosts, trained: ContextPlan, sampling: ContextPlan) -> float:
    """Lower bound of ``switch_seconds``, mostly a close one: what ranks receive, unrouted."""
    before, after = (trained.plan, trained.ranks), (sampling.plan, sampling.ranks)
    if before == after:
        return 0.0
    element = BYTES_PER_PARAMETER[trained.options.dtype]
    received = _received(trained.model, before, after, links.ranks_per_node)
    near = element * links.least_p2p("node") if any(near for near, _ in received) else 0.0
    far = element * links.least_p2p("network") if any(far for _, far in received) else 0.0
    return max((near * one + far * other for one, other in received), default=0.0)


def _seconds(links: LinkCosts, place: Place, size: float) -> float:
    if size <= 0:
        return 0.0
    return links.p2p(0, 1 if place == "node" else links.ranks_per_node, size)


_Placed = tuple[ParallelPlan, tuple[int, ...]]  # a plan, and the ranks it lies on


@lru_cache(maxsize=4096)
def _received(
    model: ModelSpec, before: _Placed, after: _Placed, ranks_per_node: int
) -> frozenset[tuple[float, float]]:
    """Numbers from their node and from others that ranks receive, and those of a node in the mean.

    Who of a node's ranks gets from another one what they share is not known. It is left out of
    their own numbers, and exact in the mean, which the one with the most to wait for is not below.
    """
    runs, source, destination = _sides(model, before, after)
    by_rank = {rank: [0, 0] for rank in after[1]}
    together: dict[int, list[int]] = {rank // ranks_per_node: [0, 0] for rank in after[1]}
    for arrival in arrivals(source, destination, ranks_per_node=ranks_per_node):
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


def _sides(
    model: ModelSpec, before: _Placed, after: _Placed
) -> tuple[LayerRuns, Holdings, Holdings]:
    """One layer of every run, and who holds what of it."""
    runs = layer_runs(model, before[0], after[0])
    source = Holdings(runs.model, runs.before, before[1])
    return runs, source, Holdings(runs.model, runs.after, after[1])


@lru_cache(maxsize=4096)
def _busiest(
    model: ModelSpec, before: _Placed, after: _Placed, ranks_per_node: int
) -> frozenset[_Side]:
    """Numbers that ranks receive, or send, by place, with one layer of every run to route.

    What is received is exact. Replicas share what is sent by layers, hence not as evenly here as
    in the whole model's table: of large models the busiest has at most a tenth more.
    """
    runs, source, destination = _sides(model, before, after)
    table = routing_table(source, destination, ranks_per_node=ranks_per_node)
    sent: dict[Place, Counter[int]] = {"node": Counter(), "network": Counter()}
    received: dict[Place, Counter[int]] = {"node": Counter(), "network": Counter()}
    for route in table.routes:
        numbers, node = route.size * runs.times(route.tensor), route.source // ranks_per_node
        for receiver in route.destinations:
            place: Place = "node" if node == receiver // ranks_per_node else "network"
            sent[place][route.source] += numbers
            received[place][receiver] += numbers
    return frozenset(
        tuple(sorted((place, numbers_of[rank]) for place, numbers_of in side.items()))
        for side in (sent, received)
        for rank in {*before[1], *after[1]}
    )
