"""The order of ranks for a plan that moves least of a model to it."""

from collections import Counter
from math import prod

from puzzle_align.layout.holdings import Holdings
from puzzle_align.layout.layer_runs import LayerRuns, layer_runs
from puzzle_align.layout.plan import ParallelPlan
from puzzle_align.layout.rules import extents, overlap

_Part = tuple[int, int]  # (pipeline rank, tensor rank)


def ordered_ranks(source: Holdings, plan: ParallelPlan, ranks: tuple[int, ...]) -> tuple[int, ...]:
    """``ranks`` in the order in which the source's model is put on them under ``plan``.

    The order of least traffic where they are exactly the source's ranks, else the order given.
    """
    if set(ranks) == set(source.ranks):
        return ranks_of_least_traffic(source, plan)
    return ranks


def ranks_of_least_traffic(source: Holdings, plan: ParallelPlan) -> tuple[int, ...]:
    """The source's ranks in an order for ``plan`` in which they already hold much of their part.

    Ranks and parts of the plan are matched greedily, the pair with the most in common first. For
    plans that differ by whole factors this is HybridFlow's grouping (its 3D-HybridEngine): T 8 -> 2
    keeps an eighth of the model on every rank, where ranks in their usual order would keep it on
    half of them.

    Args:
        plan: for as many ranks as the source has.
    """
    assert plan.world_size == len(source.ranks), f"{plan} is for {plan.world_size} ranks"
    runs = layer_runs(source.model, source.plan, plan)
    unplaced = Holdings(runs.model, runs.after, tuple(range(plan.world_size)))
    common = _in_common(Holdings(runs.model, runs.before, source.ranks), unplaced, runs)
    room = {(p, t): plan.data for p in range(plan.pipeline) for t in range(plan.tensor)}
    placed: dict[_Part, list[int]] = {part: [] for part in room}
    unplaced_ranks = set(source.ranks)
    pairs = ((rank, part) for rank in source.ranks for part in room)
    usual = {rank: unplaced.topology.coordinates(n) for n, rank in enumerate(source.ranks)}

    def order(pair: tuple[int, _Part]) -> tuple[int, bool, int, _Part]:
        rank, part = pair
        return -common[pair], usual[rank][::2] != part, rank, part  # first where it would lie

    for rank, part in sorted(pairs, key=order):
        if rank in unplaced_ranks and len(placed[part]) < room[part]:
            placed[part].append(rank)
            unplaced_ranks.remove(rank)
    replicas = range(plan.data)
    return tuple(
        sorted(placed[p, t])[d]
        for p in range(plan.pipeline)
        for d in replicas
        for t in range(plan.tensor)
    )


def _in_common(source: Holdings, wanted: Holdings, runs: LayerRuns) -> Counter[tuple[int, _Part]]:
    """Numbers that a rank of the source and a part of the other plan have in common."""
    numbers: Counter[tuple[int, _Part]] = Counter()
    place = {
        wanted.topology.rank(p, d, t): (p, t)
        for p in range(wanted.plan.pipeline)
        for d in range(wanted.plan.data)
        for t in range(wanted.plan.tensor)
    }
    for tensor, boxes in wanted.holders.items():
        times = runs.times(tensor)
        for box, places in boxes.items():
            parts = {place[rank] for rank in places}
            for held, ranks in source.holders[tensor].items():
                shared = overlap(box, held)
                if shared is None:
                    continue
                size = times * prod(extents(shared))
                for rank in ranks:
                    for part in parts:
                        numbers[rank, part] += size
    return numbers
