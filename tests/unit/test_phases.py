"""Predicted phases of stage ppo: which models run together, and what runs when."""

from dataclasses import replace

import pytest

from puzzle_align.layout.plan import ParallelPlan
from puzzle_align.planning.phases import Phase, PhaseModel, first_ranks
from puzzle_align.schedules.actions import Kind
from puzzle_align.schedules.costs import uniform

TWO, ONE = ParallelPlan(pipeline=2), ParallelPlan()


def model(role: str, plan: ParallelPlan, first: int = 0, num_microbatches: int = 2) -> PhaseModel:
    ranks = range(first, first + plan.world_size)
    return PhaseModel(role=role, plan=plan, ranks=ranks, num_microbatches=num_microbatches)


ACTOR, CRITIC = model("actor", TWO), model("critic", TWO)
LEARN = Phase(
    name="learn",
    models=(ACTOR, CRITIC),
    train=True,
    time_shared=False,
    costs={role: uniform(2, 1.0, 2.0) for role in ("actor", "critic", "reward")},
)
ALONE = 9.0  # two microbatches on two ranks: three slots of a forward and a backward


def test_models_of_one_pipeline_are_a_team() -> None:
    assert LEARN.teams == [(ACTOR, CRITIC)]
    assert (LEARN.streams, LEARN.order) == ([], "sequential")
    shared = replace(LEARN, time_shared=True)
    assert (shared.streams, shared.order) == ([(ACTOR, CRITIC)], "time_shared")
    assert LEARN.row_names == ("P0", "P1")


def test_time_sharing_fills_a_bubble() -> None:
    """Figure 5: of two equal models, one bubble (P - 1)(Tf + Tb) is left in place of two."""
    shared = replace(LEARN, time_shared=True).timeline()
    assert LEARN.timeline().makespan <= 2 * ALONE
    assert shared.makespan == 4 * 3.0 + 3.0
    for timeline in (LEARN.timeline(), shared):
        for spans in timeline.ranks:
            actions = [span.action for span in spans]
            assert len(actions) == len(set(actions)) == 2 * 2 * 2


def test_a_score_phase_has_forwards_alone() -> None:
    score = replace(LEARN, name="score", train=False)
    timeline = score.timeline()
    assert timeline.makespan == 5.0  # four forwards and the way to the second rank
    assert {span.action.kind for rank in timeline.ranks for span in rank} == {Kind.FORWARD}


def test_models_on_ranks_apart_run_side_by_side() -> None:
    apart = replace(LEARN, models=(ACTOR, model("critic", TWO, first=2)), time_shared=True)
    assert (len(apart.teams), apart.streams, apart.order) == (2, [], "concurrent")
    assert (apart.rows, apart.row_names[2]) == ([0, 1, 2, 3], "rank 2")
    timeline = apart.timeline()
    assert timeline.makespan == ALONE
    assert timeline.ranks[2][0].start == 0.0


def test_models_of_other_plans_on_the_same_ranks_wait_for_each_other() -> None:
    critic = model("critic", ParallelPlan(data=2), num_microbatches=1)
    mixed = replace(LEARN, models=(ACTOR, critic), time_shared=True)
    assert (mixed.streams, mixed.order) == ([], "sequential")
    timeline = mixed.timeline()
    assert mixed.rows == [0, 1]
    for row in (0, 1):
        forward, backward = [s for s in timeline.ranks[row] if s.action.model == "critic"]
        assert (forward.start, backward.end) == (ALONE, ALONE + 3.0)


def test_two_share_and_a_third_is_elsewhere() -> None:
    reward = model("reward", ONE, first=2, num_microbatches=3)
    phase = replace(LEARN, models=(ACTOR, reward, CRITIC), train=False, time_shared=True)
    assert phase.teams == [(ACTOR, CRITIC), (reward,)]
    assert (phase.streams, phase.order) == ([(ACTOR, CRITIC)], "time_shared")
    ends = [spans[-1].end for spans in phase.timeline().ranks]
    assert ends == [4.0, 5.0, 3.0]


def test_one_model_is_alone_and_one_rank_has_no_bubbles() -> None:
    assert replace(LEARN, models=(CRITIC,), time_shared=True).order == "alone"
    single = replace(LEARN, models=(model("actor", ONE), model("critic", ONE)), time_shared=True)
    assert (single.streams, single.order) == ([], "sequential")
    assert single.timeline().makespan == 2 * 2 * 3.0


@pytest.mark.parametrize(
    ("models", "firsts"),
    [
        ([model("a", ParallelPlan(pipeline=2, data=2))], [0, 2]),
        ([model("a", ParallelPlan(data=4)), model("b", ParallelPlan(data=2))], [0, 2]),
        ([model("a", ONE), model("b", ONE, first=3)], [0, 3]),
        ([model("a", ParallelPlan(tensor=4)), model("b", ParallelPlan(pipeline=4))], [0, 1, 2, 3]),
    ],
)
def test_ranks_that_hold_the_same_are_one_row(models, firsts) -> None:
    assert first_ranks(models) == firsts
