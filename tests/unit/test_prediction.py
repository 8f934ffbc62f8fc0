"""Predicted passes of a phase: what runs on which ranks when, and what is kept meanwhile."""

import itertools
from collections.abc import Sequence
from dataclasses import replace

import pytest

from puzzle_align.layout.job_plan import ContextPlan, Order, resolve_order
from puzzle_align.layout.plan import ParallelPlan
from puzzle_align.planning.prediction import most_kept
from puzzle_align.schedules.actions import Kind
from puzzle_align.schedules.timeline import Timeline
from tests.unit.job_plans import ONE, TWO, context, fed, uniform_run


def times(timeline: Timeline, lane: int, model: str, kind: Kind) -> list[tuple[int, float]]:
    return [
        (span.action.microbatch, span.start)
        for span in timeline.ranks[lane]
        if span.action.model == model and span.action.kind is kind
    ]


RUN = uniform_run(fed(TWO, TWO), num_passes=4)
# Two microbatches on two ranks: three slots of one forward, or of a forward and a backward.
REFERENCE_TIME, POLICY_TIME = 3.0, 9.0


def test_sequential_passes_are_alike_and_the_reference_comes_first() -> None:
    passes = list(RUN.passes(start=1))
    assert [one_pass.makespan for one_pass in passes] == [REFERENCE_TIME + POLICY_TIME] * 3
    assert times(passes[0], 0, "reference", Kind.FORWARD) == [(0, 0.0), (1, 1.0)]
    assert times(passes[0], 1, "reference", Kind.FORWARD) == [(0, 1.0), (1, 2.0)]
    assert times(passes[0], 0, "actor", Kind.FORWARD)[0] == (0, REFERENCE_TIME)


def test_without_a_reference_the_policy_is_alone() -> None:
    passes = list(uniform_run([context("actor", TWO)], num_passes=4).passes())
    assert [one_pass.makespan for one_pass in passes] == [POLICY_TIME] * 4


def test_time_shared_passes_run_every_reference_forward_once() -> None:
    shared = RUN.in_order("time_shared")
    assert shared.phase == replace(RUN.phase, order="time_shared")
    passes = list(shared.passes(start=1))
    for lane in (0, 1):
        ran = []
        for number, one_pass in enumerate(passes):
            found = times(one_pass, lane, "reference", Kind.FORWARD)
            ran += [2 * number + microbatch for microbatch, _ in found]
        assert sorted(ran) == list(range(2 * len(passes)))
    assert sum(one_pass.makespan for one_pass in passes) < sum(
        one_pass.makespan for one_pass in RUN.passes(start=1)
    )


def test_every_pass_has_the_microbatches_of_its_number() -> None:
    """The reference of pass t + 1 reads that pass's rows, in pass t or before pass t + 1."""
    counts = [3, 1, 2]
    run = replace(
        RUN,
        num_microbatches=dict.fromkeys(("actor", "reference"), counts.__getitem__),
        num_passes=3,
    )
    apart = uniform_run(fed(TWO, TWO, first=2)).phase
    beside = replace(run, phase=replace(apart, order="concurrent"))
    for number, one_pass in enumerate(run.passes()):
        assert [len(times(one_pass, 0, role, Kind.FORWARD)) for role in ("actor", "reference")] == [
            counts[number]
        ] * 2
    for one_pass, trained, ahead in zip(beside.passes(), counts, (3 + 1, 2, 0), strict=True):
        assert len(times(one_pass, 0, "actor", Kind.BACKWARD)) == trained
        assert len(times(one_pass, 2, "reference", Kind.FORWARD)) == ahead
    for lane in (0, 1):
        passes = list(run.in_order("time_shared").passes())
        assert [len(times(one_pass, lane, "actor", Kind.FORWARD)) for one_pass in passes] == counts
        ran, begun = [], 0  # number of a pass's first microbatch among all
        for number, one_pass in enumerate(passes):
            ran += [begun + mb for mb, _ in times(one_pass, lane, "reference", Kind.FORWARD)]
            begun += counts[number]
        assert sorted(ran) == list(range(sum(counts)))


@pytest.mark.parametrize("order", ["sequential", "time_shared"])
@pytest.mark.parametrize("start", [0, 1])
def test_models_that_train_together_each_have_their_own_number(order: Order, start: int) -> None:
    counts = {"actor": [2, 4, 3], "critic": [1, 2, 5]}
    run = replace(
        uniform_run([context("actor", TWO), context("critic", TWO)], order),
        num_microbatches={role: numbers.__getitem__ for role, numbers in counts.items()},
        num_passes=3,
    )
    passes = list(run.passes(start))
    assert len(passes) == 3 - start
    for number, timeline in enumerate(passes, start):
        for role, lane in itertools.product(counts, (0, 1)):
            for kind in (Kind.FORWARD, Kind.BACKWARD):
                assert [n for n, _ in times(timeline, lane, role, kind)] == list(
                    range(counts[role][number])
                )


def test_a_concurrent_reference_is_a_batch_ahead_on_lanes_of_its_own() -> None:
    contexts = fed(TWO, ParallelPlan(pipeline=2, data=2), first=2)
    assert resolve_order(contexts, share=False) == "concurrent"
    run = uniform_run(contexts, "concurrent", {"reference": 1}, num_passes=4)
    assert run.phase.lanes == (0, 1, 2, 4)
    assert run.phase.lane_names == ("rank 0", "rank 1", "rank 2", "rank 4")
    first, second, third, last = run.passes()
    # One microbatch passes two ranks before the policy can begin, then the next batch's does.
    assert times(first, 2, "reference", Kind.FORWARD) == [(0, 0.0), (0, 2.0)]
    assert times(first, 3, "reference", Kind.FORWARD) == [(0, 1.0), (0, 3.0)]
    assert times(first, 0, "actor", Kind.FORWARD)[0] == (0, 2.0)
    assert (first.makespan, second.makespan) == (2 + POLICY_TIME, POLICY_TIME)
    assert times(second, 2, "reference", Kind.FORWARD) == [(0, 0.0)]
    assert third == second
    assert last.ranks[2] == last.ranks[3] == ()


@pytest.mark.parametrize(
    ("policy", "reference", "lanes"),
    [
        (ParallelPlan(pipeline=4), ParallelPlan(pipeline=2, data=2), (0, 1, 2, 3)),
        (ParallelPlan(pipeline=2, tensor=2), ParallelPlan(pipeline=4), (0, 1, 2, 3)),
        (ParallelPlan(pipeline=2, data=3), ParallelPlan(pipeline=3, data=2), (0, 2, 3, 4)),
        (ParallelPlan(data=4), ParallelPlan(tensor=4), (0,)),
    ],
)
def test_a_lane_is_a_set_of_ranks_that_hold_the_same_parts(
    policy: ParallelPlan, reference: ParallelPlan, lanes: tuple[int, ...]
) -> None:
    run = uniform_run(fed(policy, reference), num_positions=4)
    assert run.phase.lanes == lanes
    one_pass = next(run.passes())
    for lane, rank in enumerate(lanes):
        for model, plan in (("actor", policy), ("reference", reference)):
            part = rank // (plan.data * plan.tensor)
            found = times(one_pass, lane, model, Kind.FORWARD)
            assert len(found) == 2
            if model == "reference":
                assert found[0] == (0, float(part))
    named = tuple(f"P{number}" for number in range(len(lanes)))
    assert (run.phase.lane_names == named) == (policy.pipeline == len(lanes))


@pytest.mark.parametrize("order", ["sequential", "time_shared"])
def test_a_lane_shows_its_own_ranks_whatever_their_order(order: Order) -> None:
    contexts = [replace(plan, ranks=(1, 0)) for plan in fed(TWO, TWO)]
    run = uniform_run(contexts, order, num_passes=2)
    assert run.phase.lanes == (0, 1)
    plain = RUN.in_order(order)
    for turned, one_pass in zip(run.passes(), replace(plain, num_passes=2).passes(), strict=True):
        assert turned.ranks == one_pass.ranks[::-1]


def test_interleaved_chunks_are_kept() -> None:
    plan = ParallelPlan(pipeline=2, virtual_pipeline=2)
    run = uniform_run(fed(plan, plan), num_positions=4)
    chunks = [s.action.chunk for s in next(run.passes()).ranks[0] if s.action.model == "actor"]
    assert sorted(chunks) == [0] * 4 + [1] * 4


# Phases in which no model feeds another: stage ppo's score and learn.
ACTOR, CRITIC = context("actor", TWO), context("critic", TWO)
LEARN = uniform_run([ACTOR, CRITIC])
SHARED = LEARN.in_order("time_shared")
ALONE = POLICY_TIME


def order_of(contexts: Sequence[ContextPlan]) -> Order:
    return resolve_order(contexts, share=True)


def test_time_sharing_fills_a_bubble() -> None:
    """Figure 5: of two equal models, one bubble (P - 1)(Tf + Tb) is left in place of two."""
    (sequential,), (shared,) = LEARN.passes(), SHARED.passes()
    assert sequential.makespan == 2 * ALONE
    assert shared.makespan == 4 * 3.0 + 3.0
    for timeline in (sequential, shared):
        for spans in timeline.ranks:
            actions = [span.action for span in spans]
            assert len(actions) == len(set(actions)) == 2 * 2 * 2


def test_a_score_phase_has_forwards_alone() -> None:
    score = uniform_run([context(role, TWO, "infer") for role in ("actor", "critic")])
    (timeline,) = score.passes()
    assert timeline.makespan == 5.0  # four forwards and the way to the second rank
    assert {span.action.kind for rank in timeline.ranks for span in rank} == {Kind.FORWARD}
    assert most_kept(score) == {}


def test_models_on_ranks_apart_run_side_by_side() -> None:
    contexts = [ACTOR, context("critic", TWO, first=2)]
    assert order_of(contexts) == "concurrent"
    run = uniform_run(contexts, "concurrent")
    groups = run.phase.colocated
    assert (len(groups), [run.phase.shares_time(group) for group in groups]) == (2, [False] * 2)
    assert run.phase.lanes == (0, 1, 2, 3)
    assert run.phase.lane_names[2] == "rank 2"
    (timeline,) = run.passes()
    assert timeline.makespan == ALONE
    assert timeline.ranks[2][0].start == 0.0


def test_models_of_other_plans_on_the_same_ranks_wait_for_each_other() -> None:
    contexts = [ACTOR, context("critic", ParallelPlan(data=2))]
    assert order_of(contexts) == "sequential"
    run = uniform_run(contexts, counts={"critic": 1})
    assert not any(map(run.phase.shares_time, run.phase.colocated))
    (timeline,) = run.passes()
    assert run.phase.lanes == (0, 1)
    for lane in (0, 1):
        forward, backward = [s for s in timeline.ranks[lane] if s.action.model == "critic"]
        assert (forward.start, backward.end) == (ALONE, ALONE + 3.0)


def test_two_share_and_a_third_is_elsewhere() -> None:
    actor, critic = context("actor", TWO, "infer"), context("critic", TWO, "infer")
    reward = context("reward", ONE, "infer", first=2)
    contexts = [actor, reward, critic]
    assert order_of(contexts) == "time_shared"
    run = uniform_run(contexts, "time_shared", {"reward": 3})
    assert run.phase.colocated == ((actor, critic), (reward,))
    assert list(map(run.phase.shares_time, run.phase.colocated)) == [True, False]
    (timeline,) = run.passes()
    assert [spans[-1].end for spans in timeline.ranks] == [4.0, 5.0, 3.0]


def test_one_model_is_sequential_and_one_rank_has_no_bubbles() -> None:
    assert order_of([CRITIC]) == "sequential"
    contexts = [context("actor", ONE), context("critic", ONE)]
    assert order_of(contexts) == "sequential"
    run = uniform_run(contexts)
    assert not run.in_order("time_shared").phase.shares_time(contexts)
    for order in ("sequential", "time_shared"):
        (timeline,) = run.in_order(order).passes()
        assert timeline.makespan == 2 * 2 * 3.0


def test_groups_wait_only_for_those_on_their_ranks() -> None:
    """Actor on 0-1, critic on 1-2, reward on 3: the critic waits for rank 1."""
    contexts = [ACTOR, context("critic", TWO, first=1), context("reward", ONE, first=3)]
    assert order_of(contexts) == "sequential"
    (timeline,) = uniform_run(contexts).passes()
    starts = [{s.action.model: s.start for s in reversed(spans)} for spans in timeline.ranks]
    left = 7.0  # two forwards and backwards, begun when the first forward has arrived
    assert starts == [
        {"actor": 0.0},
        {"actor": 1.0, "critic": left},
        {"critic": left + 1.0},
        {"reward": 0.0},
    ]
    assert timeline.makespan == left + ALONE


def peaks(
    contexts: Sequence[ContextPlan],
    order: Order = "sequential",
    counts: dict[str, int] | None = None,
    num_passes: int = 2,
    **sizes: float,
) -> dict[str, tuple[float, ...]]:
    """Peak where a forward of a role keeps ``sizes``; 1 without."""
    run = uniform_run(contexts, order, counts, num_positions=4, num_passes=num_passes)
    sized = {
        role: replace(run.costs[role], activation=(size,) * len(run.costs[role].forward))
        for role, size in sizes.items()
    }
    return most_kept(replace(run, costs={**run.costs, **sized}))


def test_peaks_are_those_of_the_trained_model_in_the_costs_unit() -> None:
    four = ParallelPlan(pipeline=4)
    policy, many = [context("actor", four)], {"actor": 16}
    assert peaks(policy, counts=many) == {"actor": (4.0, 3.0, 2.0, 1.0)}
    assert peaks(policy, counts=many, actor=2.5) == {"actor": (10.0, 7.5, 5.0, 2.5)}
    assert peaks(policy, counts={"actor": 2}) == {"actor": (2.0, 2.0, 2.0, 1.0)}
    plan = ParallelPlan(pipeline=2, virtual_pipeline=2)  # (V - 1) P + 2 (P - p - 1) + 1
    assert peaks([context("actor", plan)], counts={"actor": 8}) == {"actor": (5.0, 3.0)}


@pytest.mark.parametrize("num_passes", [1, 3])
def test_a_frozen_model_keeps_nothing(num_passes: int) -> None:
    """Before the trained one, in its bubbles, or beside it: activations are the trained one's."""
    counts = {"actor": 6, "reference": 6}
    expected = {"actor": (2 * 3.0, 3.0)}
    turns: list[tuple[Order, int]] = [("sequential", 0), ("time_shared", 0), ("concurrent", 2)]
    for order, first in turns:
        found = peaks(fed(TWO, TWO, first), order, counts, num_passes, actor=3.0, reference=100.0)
        assert found == expected


def test_a_pass_has_the_peaks_of_its_own_microbatches() -> None:
    counts = [1, 5]
    for order in ("sequential", "time_shared"):
        run = replace(
            RUN.in_order(order),
            num_microbatches=dict.fromkeys(("actor", "reference"), counts.__getitem__),
            num_passes=2,
        )
        assert most_kept(run) == {"actor": (1.0, 1.0)}


@pytest.mark.parametrize("order", ["sequential", "time_shared"])
def test_colocated_models_keep_no_more_than_the_larger_one(order: Order) -> None:
    counts = {"actor": 6, "critic": 6}
    found = peaks([ACTOR, CRITIC], order, counts, actor=5.0, critic=2.0)
    assert found["actor"] == found["critic"]  # together
    assert found["actor"] == (10.0, 5.0)
    apart = peaks([ACTOR, context("critic", TWO, first=2)], "concurrent", counts, critic=2.0)
    assert apart == {"actor": (2.0, 1.0), "critic": (4.0, 2.0)}
