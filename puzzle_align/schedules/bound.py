"""The least that models take on one pipeline, whatever the order of their actions.

On every rank: all its work, and before and after it, until the first microbatch has come to it and
the last one has gone on (or its gradient back) from it. Windows of a lookahead model are not known
here.
"""

from collections.abc import Mapping, Sequence
from itertools import accumulate
from math import inf

from puzzle_align.schedules.costs import ModelCosts

# Of a model, by pipeline rank: time of a transfer from a rank to the next one, and the way back.
Hops = tuple[Sequence[float], Sequence[float]]


def least_makespan(
    costs: Sequence[ModelCosts],
    counts: Sequence[float],
    num_ranks: int,
    hops: Sequence[Hops] | None = None,
) -> float:
    """Least makespan of models with these costs and numbers of microbatches, in the costs' unit.

    ``hops``: of each model, what transfers take; None: nothing.
    """
    work, before, after = [0.0] * num_ranks, [inf] * num_ranks, [inf] * num_ranks
    for number, (model_costs, count) in enumerate(zip(costs, counts, strict=True)):
        to_next, back = hops[number] if hops else ((0.0,) * (num_ranks - 1),) * 2
        there = _sums(model_costs.forward[:num_ranks], to_next)
        if model_costs.backward:
            gone = _sums(model_costs.backward[:num_ranks], back)
        else:  # positions behind the rank's last
            last = model_costs.forward[-num_ranks:]
            gone = _sums(last[::-1], to_next[::-1])[::-1]
        for rank in range(num_ranks):
            work[rank] += count * work_of(model_costs, rank, num_ranks)
            before[rank] = min(before[rank], there[rank])
            after[rank] = min(after[rank], gone[rank])
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
