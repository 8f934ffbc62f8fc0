"""Parts, lanes and turns of contexts, whatever their plans and the order of their ranks."""

from dataclasses import replace
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from puzzle_align.layout.job_plan import (
    ContextPlan,
    Workload,
    resolve_order,
    sets_of_ranks,
    sharing_obstacle,
)
from puzzle_align.layout.plan import ParallelPlan
from tests.unit.job_plans import FOUR, ONE, any_plan, context, phase_of


def test_parts_of_ranks_in_any_order() -> None:
    context_plan = context("actor", FOUR, ranks=(7, 2, 5, 0))
    assert context_plan.parts == (7, 5)
    assert [context_plan.part(rank) for rank in (7, 2, 5, 0)] == [0, 0, 1, 1]
    assert context_plan.part(1) is None
    assert [context_plan.output_rank(data_rank) for data_rank in range(2)] == [5, 0]
    eight = ParallelPlan(pipeline=2, tensor=2, data=2)
    tensor = context("actor", eight, ranks=(3, 2, 1, 0, 9, 8, 7, 6))
    assert tensor.parts == (3, 9)
    assert [tensor.output_rank(data_rank) for data_rank in range(2)] == [9, 7]
    assert tensor.topology.coordinates(7) == (1, 1, 0)
    with pytest.raises(ValueError, match="needs 4 distinct ranks"):
        _ = context("actor", FOUR, ranks=(0, 1, 2)).topology


def test_contexts_are_colocated_under_one_plan_on_the_same_ranks() -> None:
    context_plan = context("actor", FOUR)
    assert context_plan.is_colocated(context("critic", FOUR, "infer"))
    assert context_plan.is_colocated(context("critic", replace(FOUR, pipeline_layers=(3, 1))))
    assert not context_plan.is_colocated(context("critic", FOUR, ranks=(1, 0, 2, 3)))
    assert not context_plan.is_colocated(context("critic", FOUR, first=1))
    assert not context_plan.is_colocated(context("critic", replace(FOUR, sequence_parallel=True)))


def test_a_lane_is_named_for_the_trained_models_pipeline_rank() -> None:
    actor = context("actor", FOUR)
    assert phase_of(actor).lanes == (0, 2)
    whole = context("reference", ParallelPlan(data=4), "infer")
    assert phase_of(whole, actor).lane_names == ("P0", "P1")
    assert phase_of(replace(whole, workload="train"), actor).lane_names == ("rank 0", "rank 2")
    frozen = replace(actor, workload="infer")
    assert phase_of(frozen, whole).lane_names == ("rank 0", "rank 2")
    assert phase_of(frozen).lane_names == ("P0", "P1")
    later = context("critic", FOUR, first=4)
    assert phase_of(later).lane_names == ("P0", "P1")
    assert phase_of(actor, later).lane_names == tuple(f"rank {rank}" for rank in (0, 2, 4, 6))


def test_a_lane_is_its_smallest_rank() -> None:
    turned = context("actor", FOUR, ranks=(3, 1, 2, 0))
    assert sets_of_ranks([turned]) == [(0, 2), (1, 3)]
    assert phase_of(turned).lanes == (0, 1)
    assert phase_of(turned).lane_names == ("rank 0", "rank 1")


@pytest.mark.parametrize(
    ("contexts", "sets"),
    [
        ([context("a", FOUR)], [(0, 1), (2, 3)]),
        ([context("a", ParallelPlan(data=4)), context("b", FOUR)], [(0, 1), (2, 3)]),
        (
            [context("a", ParallelPlan(data=4)), context("b", ParallelPlan(data=2))],
            [(0, 1), (2, 3)],
        ),
        ([context("a", ONE), context("b", ONE, first=3)], [(0,), (3,)]),
        (
            [context("a", ParallelPlan(tensor=4)), context("b", ParallelPlan(pipeline=4))],
            [(0,), (1,), (2,), (3,)],
        ),
        (
            [context("a", ParallelPlan(data=4)), context("b", ParallelPlan(data=2), ranks=(2, 1))],
            [(0, 3), (1, 2)],
        ),
    ],
)
def test_alike_ranks_are_one_set(contexts: list[ContextPlan], sets: list[tuple[int, ...]]) -> None:
    assert sets_of_ranks(contexts) == sets
    assert phase_of(*contexts).lanes == tuple(context_plan[0] for context_plan in sets)


@st.composite
def placed(draw: st.DrawFn, role: str = "actor") -> ContextPlan:
    plan = draw(any_plan)
    ranks = draw(st.permutations(range(plan.world_size + 4)))[: plan.world_size]
    return context(role, plan, draw(st.sampled_from(get_args(Workload))), ranks=ranks)


@given(placed())
def test_parts_are_the_topologys(context_plan: ContextPlan) -> None:
    for rank in context_plan.ranks:
        pipeline, data, tensor = context_plan.topology.coordinates(rank)
        assert context_plan.part(rank) == pipeline
        assert rank in context_plan.ranks_of(pipeline)
        assert (rank == context_plan.parts[pipeline]) == (data == tensor == 0)
        is_output = (pipeline, tensor) == (context_plan.plan.pipeline - 1, 0)
        assert (rank == context_plan.output_rank(data)) == is_output
    sizes = [len(context_plan.ranks_of(part)) for part in range(context_plan.plan.pipeline)]
    assert sum(sizes) == len(context_plan.ranks)
    outside = set(range(max(context_plan.ranks) + 2)) - set(context_plan.ranks)
    assert {context_plan.part(rank) for rank in outside} == {None}


@given(
    st.lists(st.sampled_from("abcd"), unique=True, min_size=1).flatmap(
        lambda roles: st.tuples(*(placed(role) for role in roles))
    )
)
def test_sets_partition_the_ranks_by_what_they_hold(contexts: tuple[ContextPlan, ...]) -> None:
    sets = sets_of_ranks(contexts)
    everyone = [rank for ranks in sets for rank in ranks]
    assert sorted(everyone) == sorted(
        {rank for context_plan in contexts for rank in context_plan.ranks}
    )
    held = [
        {tuple(context_plan.part(rank) for context_plan in contexts) for rank in ranks}
        for ranks in sets
    ]
    assert all(len(parts) == 1 for parts in held)
    assert len(set.union(*held)) == len(sets)
    assert list(phase_of(*contexts).lanes) == sorted(min(ranks) for ranks in sets)


@given(
    st.lists(
        st.tuples(st.sampled_from([FOUR, ParallelPlan(data=2)]), st.sampled_from([0, 2, 4])),
        max_size=4,
    ),
    st.booleans(),
)
def test_turns_follow_ranks_and_plans(places: list[tuple[ParallelPlan, int]], share: bool) -> None:
    contexts = [
        context(f"model {number}", plan, first=first) for number, (plan, first) in enumerate(places)
    ]
    order = resolve_order(contexts, share=share)
    phase = phase_of(*contexts, order=order)
    # In order, everyone once, those together that are colocated.
    assert sorted(context_plan.role for group in phase.colocated for context_plan in group) == [
        context_plan.role for context_plan in contexts
    ]
    assert len(phase.colocated) == len(set(places))
    for group in phase.colocated:
        assert all(context_plan.is_colocated(group[0]) for context_plan in group)
        assert [context_plan.role for context_plan in group] == sorted(
            context_plan.role for context_plan in group
        )
    fills = any(places.count(place) > 1 and place[0].pipeline > 1 for place in places)
    ranks = [rank for context_plan in contexts for rank in context_plan.ranks]
    apart = len(contexts) > 1 and len(set(ranks)) == len(ranks)
    assert (sharing_obstacle(contexts) is None) == fills
    if share and fills:
        assert order == "time_shared"
    else:
        assert order == ("concurrent" if apart else "sequential")
    assert any(map(phase.shares_time, phase.colocated)) == (order == "time_shared")
