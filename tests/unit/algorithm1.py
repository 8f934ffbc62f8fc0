"""PUZZLE's Algorithm 1 (section 5.2), as printed: routing tables by number conversion.

It is for plans whose pipeline shrinks by a whole factor f while the tensor size grows by f, with
as many replicas: the weights of rank (p, d, t) go to (p / f, d, t f) .. (p / f, d, t f + f - 1).
``resharding.routing`` supports any two plans: with one replica its table has the same sources and
destinations. With several, the paper's always sends from replica d to replica d, even numbers that
the receiver holds as part of another replica; ours does not send those.
"""

from puzzle_align.layout.plan import ParallelPlan

Index = tuple[int, int, int]  # (pipeline, data, tensor)


def get_index(rank: int, plan: ParallelPlan) -> Index:
    """GETINDEX: coordinates of a rank."""
    pipeline, data, tensor = plan.pipeline, plan.data, plan.tensor
    return rank // (data * tensor) % pipeline, rank // tensor % data, rank % tensor


def get_rank(index: Index, plan: ParallelPlan) -> int:
    """GETRANK: the rank of coordinates."""
    return index[0] * plan.data * plan.tensor + index[1] * plan.tensor + index[2]


def get_routing_table(rank: int, source: ParallelPlan, destination: ParallelPlan) -> list[int]:
    """GETROUTINGTBL: ranks that need the weights of ``rank``, which may be one of them.

    Raises:
        ValueError: the pipeline does not shrink by the whole factor by which the tensor size grows,
            or the number of replicas changes.
    """
    factor = source.pipeline // destination.pipeline
    fits = source.pipeline == factor * destination.pipeline
    if not fits or destination.tensor != factor * source.tensor or source.data != destination.data:
        raise ValueError(
            f"Algorithm 1 is not for {source} to {destination}: P must shrink by a whole factor by "
            "which T grows, and D stay; resharding.routing serves any two plans"
        )
    pipeline, data, tensor = get_index(rank, source)
    # f_T = T_src / T_dst is 1 / f: dividing by it multiplies.
    return [
        get_rank((pipeline // factor, data, tensor * factor + i), destination)
        for i in range(factor)
    ]
