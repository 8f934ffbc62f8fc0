"""A lower bound of the makespan of models on one pipeline, for any order of their actions.

For every rank: all its work, the time until the first microbatch reaches it, and the time from its
last work until the last microbatch (or its gradient) leaves the pipeline. Windows of a lookahead
model are not considered.
"""

from collections.abc import Mapping, Sequence
from itertools import accumulate
from math import inf

from puzzle_align.schedules.costs import ModelCosts

# Transfer times of a model by pipeline rank: from a rank to the next one, and back.
Hops = tuple[Sequence[float], Sequence[float]]


def least_makespan(
    costs: Sequence[ModelCosts],
    counts: Sequence[float],
    num_ranks: int,
    hops: Sequence[Hops] | None = None,
) -> float:
    """Least makespan of models with these costs and numbers of microbatches, in the costs' unit.

    ``hops``: transfer times of each model; None: 0.
    """
    work, before, after = [0.0] * num_ranks, [inf] * num_ranks, [inf] * num_ranks
    for number, (model_costs, count) in enumerate(zip(costs, counts, strict=True)):
        to_next, back = hops[number] if hops else ((0.0,) * (num_ranks - 1),) * 2
        arrival = _sums(model_costs.forward[:num_ranks], to_next)
        if model_costs.backward:
            departure = _sums(model_costs.backward[:num_ranks], back)
        else:  # positions behind the rank's last
            last = model_costs.forward[-num_ranks:]
            departure = _sums(last[::-1], to_next[::-1])[::-1]
        for rank in range(num_ranks):
            work[rank] += count * work_of(model_costs, rank, num_ranks)
            before[rank] = min(before[rank], arrival[rank])
            after[rank] = min(after[rank], departure[rank])
    return max(map(sum, zip(before, work, after, strict=True)))


def _sums(times: Sequence[float], hops: Sequence[float]) -> list[float]:
    """Sums, for every position, of the times before it and the hops between them."""
    steps = (time + hop for time, hop in zip(times[:-1], hops, strict=True))
    return [0.0, *accumulate(steps)]


def busiest_rank(costs: Mapping[str, ModelCosts], num_ranks: int) -> float:
    """The most work that a rank has with a microbatch of every model."""
    ranks = range(num_ranks)
    return max(sum(work_of(each, rank, num_ranks) for each in costs.values()) for rank in ranks)


def work_of(costs: ModelCosts, rank: int, num_ranks: int) -> float:
    """Time of a microbatch on a pipeline rank, all its chunks together."""
    return sum(costs.forward[rank::num_ranks]) + sum(costs.backward[rank::num_ranks])
