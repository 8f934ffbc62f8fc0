"""Ranks for sampling: tensor groups stay on a node, and ranks keep much of what they hold."""

import random
from collections.abc import Iterator, Sequence

import pytest

from puzzle_align.layout.holdings import Holdings
from puzzle_align.layout.job_plan import JobPlan, Phase
from puzzle_align.layout.plan import ParallelPlan
from puzzle_align.layout.rank_order import ordered_ranks, torn_groups
from puzzle_align.resharding.routing import lower_bound
from tests.specs import LLAMA_2_7B
from tests.unit.job_plans import context

NODE = 8


def torn(plan: ParallelPlan, ranks: Sequence[int]) -> int:
    """Number of tensor groups with ranks on several nodes."""
    groups = (ranks[n : n + plan.tensor] for n in range(0, len(ranks), plan.tensor))
    return sum(len({rank // NODE for rank in group}) > 1 for group in groups)


def bytes_received(source: Holdings, plan: ParallelPlan, ranks: tuple[int, ...]) -> int:
    return sum(lower_bound(source, Holdings(LLAMA_2_7B, plan, ranks)).values())


def pairs(number: int, seed: int) -> Iterator[tuple[ParallelPlan, ParallelPlan]]:
    """Training and sampling plans on 2 to 8 nodes."""
    draw = random.Random(seed)
    for _ in range(number):
        size = NODE * draw.choice((2, 4, 8))

        def plan(size: int = size) -> ParallelPlan:
            fitting = [
                ParallelPlan(pipeline=p, data=size // p // t, tensor=t)
                for p in (1, 2, 4, 8, 16)
                for t in (1, 2, 4, 8)
                if size % (p * t) == 0
            ]
            return draw.choice(fitting)

        yield plan(), plan()


def test_no_tensor_group_is_torn_and_no_more_is_moved_than_in_the_usual_order() -> None:
    for before, after in pairs(32, seed=25):
        source = Holdings(LLAMA_2_7B, before, tuple(range(before.world_size)))
        ranks = ordered_ranks(source, after, source.ranks, NODE)
        assert sorted(ranks) == [*source.ranks]
        assert torn(after, ranks) == 0, (before, after, ranks)
        moved = bytes_received(source, after, ranks)
        assert moved <= bytes_received(source, after, source.ranks)


def test_ppo_7b_on_two_nodes() -> None:
    before, after = ParallelPlan(pipeline=2, data=2, tensor=4), ParallelPlan(data=2, tensor=8)
    source = Holdings(LLAMA_2_7B, before, tuple(range(16)))
    ranks = ordered_ranks(source, after, source.ranks, NODE)
    assert [sorted(ranks[:8]), sorted(ranks[8:])] == [[*range(8)], [*range(8, 16)]]


def test_a_position_goes_to_the_node_that_has_its_layers() -> None:
    """The usual order has the first position on the first node, the training's on the second."""
    before, after = ParallelPlan(pipeline=2, tensor=8), ParallelPlan(pipeline=2, data=2, tensor=4)
    source = Holdings(LLAMA_2_7B, before, (*range(8, 16), *range(8)))
    ranks = ordered_ranks(source, after, tuple(range(16)), NODE)
    assert [sorted(ranks[:8]), sorted(ranks[8:])] == [[*range(8, 16)], [*range(8)]]


@pytest.mark.parametrize(
    ("trained", "sampled"),
    [
        (range(16), range(16)),  # the usual order leaves an eighth to half of them, this to all
        (range(8), range(16)),
        (range(16), range(8)),
        (range(8, 24), range(16)),
        (range(16), [n + first for n in range(8) for first in (0, 8)]),  # from node to node in turn
    ],
)
def test_ranks_keep_what_they_hold_of_the_training_s(
    trained: range, sampled: Sequence[int]
) -> None:
    before = ParallelPlan(tensor=8, data=len(trained) // 8)
    after = ParallelPlan(tensor=2, data=len(sampled) // 2)
    source = Holdings(LLAMA_2_7B, before, tuple(trained))
    ranks = ordered_ranks(source, after, tuple(sampled), NODE)
    assert sorted(ranks) == sorted(sampled) and torn(after, ranks) == 0
    usual = bytes_received(source, after, tuple(sampled))
    assert bytes_received(source, after, ranks) < 0.95 * usual


def test_the_order_is_kept_where_groups_do_not_fill_nodes() -> None:
    source = Holdings(LLAMA_2_7B, ParallelPlan(data=12), tuple(range(12)))
    plan = ParallelPlan(tensor=4, data=2)
    for ranks in (tuple(range(2, 10)), (9, 8, 7, 6, 5, 4, 3, 2)):
        assert ordered_ranks(source, plan, ranks, NODE) == ranks
    three_nodes = tuple(range(7, 17))  # only the middle one is full
    assert ordered_ranks(source, ParallelPlan(tensor=2, data=5), three_nodes, NODE) == three_nodes


def test_every_layer_of_a_run_counts() -> None:
    """Rank 0 has 26 layers of the new second position; the usual order keeps 4 and 2 and the ends.

    An embedding or head is as large as two thirds of a layer.
    """
    before, after = (
        ParallelPlan(pipeline=2, pipeline_layers=layers) for layers in ((30, 2), (4, 28))
    )
    source = Holdings(LLAMA_2_7B, before, (0, 1))
    assert ordered_ranks(source, after, (0, 1), NODE) == (1, 0)


def test_groups_that_are_torn_by_hand_are_named() -> None:
    plan, ranks = ParallelPlan(tensor=4, data=2), (0, 1, 2, 3, 6, 7, 8, 9)
    contexts = (context("actor", plan, "train", model=LLAMA_2_7B, ranks=ranks),)
    job_plan = JobPlan(
        stage="dpo",
        world_size=10,
        phases=(Phase(name="train", order="sequential", contexts=contexts),),
    )
    (line,) = torn_groups(job_plan, NODE)
    assert line == (
        "actor: 1 of 2 tensor groups, such as ranks 6 to 9, lie on several nodes of 8 ranks and "
        "communicate in every layer: choose ranks, or a tensor_model_parallel_size, that keep a "
        "group on one node"
    )
    assert list(torn_groups(job_plan, 16)) == []
