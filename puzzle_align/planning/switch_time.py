"""What a switch of plans takes: the real routing table's bytes on measured or declared links."""

from collections import Counter
from functools import lru_cache

from puzzle_align.layout.holdings import Holdings
from puzzle_align.layout.job_plan import ContextPlan
from puzzle_align.layout.layer_runs import layer_runs
from puzzle_align.layout.model import BYTES_PER_PARAMETER, ModelSpec
from puzzle_align.layout.plan import ParallelPlan
from puzzle_align.planning.link_costs import LinkCosts
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
    """Numbers that ranks receive, or send, by place, with one layer of every run to route."""
    runs = layer_runs(model, before[0], after[0])
    source = Holdings(runs.model, runs.before, before[1])
    destination = Holdings(runs.model, runs.after, after[1])
    table = routing_table(source, destination, ranks_per_node=ranks_per_node)
    found: dict[tuple[str, int], Counter[Place]] = {}
    for route in table.routes:
        numbers = route.size * runs.times(route.tensor)
        for receiver in route.destinations:
            near = route.source // ranks_per_node == receiver // ranks_per_node
            place: Place = "node" if near else "network"
            for side in (("sends", route.source), ("receives", receiver)):
                found.setdefault(side, Counter())[place] += numbers
    return tuple(sorted({tuple(sorted(sizes.items())) for sizes in found.values()}))
