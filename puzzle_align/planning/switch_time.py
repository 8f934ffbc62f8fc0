"""What a switch of plans takes: the real routing table's bytes on measured or declared links."""

from collections import Counter
from functools import lru_cache

from puzzle_align.layout.holdings import Holdings
from puzzle_align.layout.job_plan import ContextPlan
from puzzle_align.layout.layer_runs import layer_runs
from puzzle_align.layout.model import BYTES_PER_PARAMETER, ModelSpec
from puzzle_align.layout.plan import ParallelPlan
from puzzle_align.planning.link_costs import FastestLinks, LinkCosts
from puzzle_align.planning.memory import rank_parameters
from puzzle_align.planning.profile import Place
from puzzle_align.resharding.routing import routing_table

_Side = tuple[tuple[Place, int], ...]  # numbers that a rank sends, or receives, by place


def switch_seconds(
    links: LinkCosts, trained: ContextPlan, sampling: ContextPlan, ranks_per_node: int
) -> float:
    """Seconds until every rank that samples has its weights; 0 where both plans are one.

    A rank receives and sends at the same time, within its node and between nodes one after the
    other; the busiest rank's time is the switch's.
    """
    if (trained.plan, trained.ranks) == (sampling.plan, sampling.ranks):
        return 0.0
    element = BYTES_PER_PARAMETER[trained.options.dtype]
    plans = (trained.plan, trained.ranks), (sampling.plan, sampling.ranks)
    busiest = _busiest(trained.model, *plans, ranks_per_node)
    return max(
        (sum(_seconds(links, place, n * element) for place, n in side) for side in busiest),
        default=0.0,
    )


def least_switch_seconds(
    links: FastestLinks, trained: ContextPlan, sampling: ParallelPlan
) -> float:
    """No more than ``switch_seconds`` to a plan on other ranks, or in any order on the same.

    The rank with the most under the sampling's plan had at most the most under the training's, and
    gets at least half of the difference within its node or half from other nodes.
    """
    model, element = trained.model, BYTES_PER_PARAMETER[trained.options.dtype]
    most, had = (
        max(rank_parameters(model, plan, part) for part in range(plan.pipeline))
        for plan in (sampling, trained.plan)
    )
    size = element * (most - had) / 2
    return links.p2p(0, 1, size) if size > 0 else 0.0


def _seconds(links: LinkCosts, place: Place, size: float) -> float:
    if size <= 0:
        return 0.0
    return links.p2p(0, 1 if place == "node" else links.ranks_per_node, size)


@lru_cache(maxsize=4096)
def _busiest(
    model: ModelSpec,
    before: tuple[ParallelPlan, tuple[int, ...]],
    after: tuple[ParallelPlan, tuple[int, ...]],
    ranks_per_node: int,
) -> tuple[_Side, ...]:
    """Numbers that ranks receive, or send, by place, with one layer of every run to route.

    What is received is exact. Replicas share what is sent by layers, hence not as evenly here as
    in the whole model's table: of large models the busiest has at most a tenth more.
    """
    runs = layer_runs(model, before[0], after[0])
    source = Holdings(runs.model, runs.before, before[1])
    destination = Holdings(runs.model, runs.after, after[1])
    table = routing_table(source, destination, ranks_per_node=ranks_per_node)
    sent: dict[Place, Counter[int]] = {"node": Counter(), "network": Counter()}
    received: dict[Place, Counter[int]] = {"node": Counter(), "network": Counter()}
    for route in table.routes:
        numbers, node = route.size * runs.times(route.tensor), route.source // ranks_per_node
        for receiver in route.destinations:
            place: Place = "node" if node == receiver // ranks_per_node else "network"
            sent[place][route.source] += numbers
            received[place][receiver] += numbers
    ranks = {*before[1], *after[1]}
    found: set[_Side] = {
        tuple(sorted((place, own[rank]) for place, own in side.items()))
        for side in (sent, received)
        for rank in ranks
    }
    return tuple(sorted(found))
