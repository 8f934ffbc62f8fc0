"""The least that models take on one pipeline, whatever the order of their actions.

On every rank: all its work, and before and after it, until the first microbatch has come to it and
the last one has gone on (or its gradient back) from it. No transfer is counted. Windows of a
lookahead model are not known here.
"""

from collections.abc import Sequence

from puzzle_align.schedules.costs import ModelCosts


def least_makespan(costs: Sequence[ModelCosts], counts: Sequence[float], num_ranks: int) -> float:
    """Of models with these costs and numbers of microbatches, in the costs' unit."""
    return max(_of_rank(costs, counts, rank, num_ranks) for rank in range(num_ranks))


def work_of(costs: ModelCosts, rank: int, num_ranks: int) -> float:
    """Time of a microbatch on a pipeline rank, all its chunks together."""
    return sum(costs.forward[rank::num_ranks]) + sum(costs.backward[rank::num_ranks])


def _of_rank(
    costs: Sequence[ModelCosts], counts: Sequence[float], rank: int, num_ranks: int
) -> float:
    work, before, after = 0.0, [], []
    for own, count in zip(costs, counts, strict=True):
        work += count * work_of(own, rank, num_ranks)
        before.append(sum(own.forward[:rank]))
        behind = len(own.forward) - num_ranks + rank + 1  # positions behind the rank's last
        after.append(sum(own.backward[:rank]) if own.backward else sum(own.forward[behind:]))
    return min(before) + work + min(after)
