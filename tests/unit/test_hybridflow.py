"""HybridFlow's figures: that they are its paper's, and that no switch needs more.

On the ranks that its engine groups, a rank keeps its shard and gathers the rest of its new one.
"""

import itertools
from collections import Counter
from math import prod

import pytest

from puzzle_align.layout.holdings import Holdings
from puzzle_align.layout.model import num_parameters
from puzzle_align.layout.plan import ParallelPlan
from puzzle_align.layout.rank_order import ordered_ranks
from puzzle_align.layout.rules import extents
from puzzle_align.resharding import hybridflow
from puzzle_align.resharding.routing import lower_bound, routing_table
from tests.specs import LLAMA_2_7B
from tests.unit.test_routing import Move

Sizes = tuple[int, int, int]  # (P, D, T)

SETTINGS = [
    ((p, d, t), (p_g, d * p * t // (p_g * t_g), t_g))
    for p, d, t in itertools.product((1, 2, 4, 8), (1, 2), (1, 2, 4, 8))
    for p_g, t_g in itertools.product((1, 2, 4, 8), (1, 2, 4, 8))
    if p * d * t <= 16 and p % p_g == 0 and t % t_g == 0 and (p, t) != (p_g, t_g)
]
SETTINGS.append(((8, 2, 2), (2, 16, 1)))


def plan_of(sizes: Sizes, *layers: int, chunks: int = 1) -> ParallelPlan:
    pipeline, data, tensor = sizes
    return ParallelPlan(
        pipeline=pipeline, data=data, tensor=tensor, virtual_pipeline=chunks, pipeline_layers=layers
    )


def move(before: ParallelPlan, after: ParallelPlan) -> Move:
    source = Holdings(LLAMA_2_7B, before, tuple(range(before.world_size)))
    return source, Holdings(LLAMA_2_7B, after, ordered_ranks(source, after, source.ranks, 8))


def shards(holdings: Holdings) -> Counter[int]:
    """Numbers that each rank holds."""
    found: Counter[int] = Counter()
    for boxes in holdings.holders.values():
        for box, ranks in boxes.items():
            found.update(dict.fromkeys(ranks, prod(extents(box))))
    return found


def most_received(source: Holdings, after: ParallelPlan) -> int:
    """Numbers that the engine's busiest rank receives: all of its group's other ranks.

    Unlike ``even_share`` it counts embeddings on a pipeline's ends only, and norms on every tensor
    rank.
    """
    before, held, place = source.plan, shards(source), source.topology.rank
    pipelines, tensors = before.pipeline // after.pipeline, before.tensor // after.tensor
    groups = [
        [held[place(p + i, d, t + j)] for i in range(pipelines) for j in range(tensors)]
        for d in range(before.data)
        for p in range(0, before.pipeline, pipelines)
        for t in range(0, before.tensor, tensors)
    ]
    return max(sum(group) - min(group) for group in groups)


@pytest.mark.parametrize(
    ("before", "after", "share"),
    [
        ((1, 1, 4), (1, 2, 2), 1 / 4),
        ((1, 2, 4), (1, 8, 1), 3 / 4),
        ((4, 1, 1), (1, 4, 1), 3 / 4),
        ((2, 1, 4), (1, 4, 2), 3 / 8),
        ((1, 1, 8), (1, 4, 2), 6 / 16),
        ((8, 2, 2), (2, 16, 1), 7 / 16),
    ],
)
def test_the_paper_s_figure(before: Sizes, after: Sizes, share: float) -> None:
    """(tp - tg pg) / (tg pg tp) of the model."""
    assert hybridflow.even_share(plan_of(before), plan_of(after)) == pytest.approx(share)


@pytest.mark.parametrize(("before", "after"), SETTINGS)
def test_a_rank_receives_its_new_shard_less_its_old_one(before: Sizes, after: Sizes) -> None:
    """HybridFlow's bound, by the shards' true sizes: where they are unlike, its figure is a mean.

    A pipeline's ends have embedding and head besides their layers, so a rank in the middle has
    less than 1 / (pt) of the model to keep.
    """
    source, destination = move(plan_of(before), plan_of(after))
    own, wanted = shards(source), shards(destination)
    received = lower_bound(source, destination)  # what tables have: tests/unit/test_routing.py
    assert received == {rank: wanted[rank] - own[rank] for rank in source.ranks}
    assert hybridflow.applies(source.plan, destination.plan)
    most = max(received.values())
    assert 0 < most <= most_received(source, destination.plan)
    figure = hybridflow.even_share(source.plan, destination.plan) * num_parameters(LLAMA_2_7B)
    if before[0] == 1:
        assert most <= figure
    mean = sum(received.values()) / len(received)
    # Norms, which tensor ranks have in common, are kept besides: this is all that differs.
    assert mean == pytest.approx(figure, rel=1e-3)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (plan_of((4, 1, 1), 7, 9, 9, 7), plan_of((2, 2, 1))),
        (plan_of((4, 1, 2), 7, 8, 8, 9), plan_of((2, 4, 1), 15, 17)),
        (plan_of((2, 1, 2), 12, 20), plan_of((1, 4, 1))),
        (plan_of((2, 1, 2), 12, 20), plan_of((2, 2, 1), 12, 20)),
        (plan_of((4, 1, 1)), plan_of((2, 2, 1), 16, 16)),
    ],
)
def test_layers_may_be_uneven_where_they_join_up(before: ParallelPlan, after: ParallelPlan) -> None:
    assert hybridflow.applies(before, after)
    source, destination = move(before, after)
    most = max(lower_bound(source, destination).values())
    assert 0 < most <= most_received(source, after)


def test_ranks_may_lie_so_that_a_model_moves_no_more_than_in_hybridflow() -> None:
    source, destination = move(plan_of((1, 1, 8)), plan_of((1, 4, 2)))
    ranks = destination.ranks
    assert [ranks[::2], ranks[1::2]] == [(0, 1, 2, 3), (4, 5, 6, 7)]
    received = routing_table(source, destination).received
    share = hybridflow.even_share(source.plan, destination.plan) * num_parameters(LLAMA_2_7B)
    assert set(received) == set(range(8))
    assert all(0.999 * share < received[rank] <= share for rank in range(8))  # norms are there


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (plan_of((4, 1, 1)), plan_of((2, 1, 2))),
        (plan_of((1, 2, 2)), plan_of((1, 2, 2))),
        (plan_of((1, 4, 1)), plan_of((1, 1, 4))),
        (plan_of((1, 1, 4)), plan_of((2, 2, 1))),
        (plan_of((1, 1, 4)), plan_of((1, 1, 2))),
        # Neighbours along the pipeline do not hold neighbouring layers,
        (plan_of((4, 1, 1), chunks=2), plan_of((2, 2, 1))),
        (plan_of((4, 1, 1)), plan_of((2, 2, 1), chunks=2)),
        (plan_of((2, 1, 2), chunks=2), plan_of((2, 2, 1), chunks=2)),
        # or not those that one of the new ranks will.
        (plan_of((4, 1, 1), 7, 8, 8, 9), plan_of((2, 2, 1))),
        (plan_of((4, 1, 1)), plan_of((2, 2, 1), 15, 17)),
        (plan_of((2, 1, 2), 12, 20), plan_of((2, 2, 1))),
    ],
)
def test_it_does_not_serve_every_switch(before: ParallelPlan, after: ParallelPlan) -> None:
    assert not hybridflow.applies(before, after)
