"""Predicted steps of a run: which rows there are, and what runs on them when."""

from dataclasses import replace

import pytest

from puzzle_align.layout.plan import ParallelPlan
from puzzle_align.planning.steps import PlacedModel, PreferenceRun
from puzzle_align.schedules.actions import Kind
from puzzle_align.schedules.costs import uniform
from puzzle_align.schedules.timeline import Timeline


def _model(role: str, plan: ParallelPlan, first: int = 0, num_microbatches: int = 2) -> PlacedModel:
    ranks = range(first, first + plan.world_size)
    return PlacedModel(
        role=role, plan=plan, ranks=ranks, num_microbatches=lambda step: num_microbatches
    )


TWO = ParallelPlan(pipeline=2)
COSTS = {"actor": uniform(2, 1.0, 2.0), "reference": uniform(2, 1.0)}
RUN = PreferenceRun(
    policy=_model("actor", TWO),
    reference=_model("reference", TWO),
    placement="sequential",
    costs=COSTS,
    num_steps=4,
)
# Two microbatches on two ranks: three slots of one forward, or of a forward and a backward.
REFERENCE_TIME, POLICY_TIME = 3.0, 9.0


def _times(timeline: Timeline, row: int, model: str, kind: Kind) -> list[tuple[int, float]]:
    return [
        (span.action.microbatch, span.start)
        for span in timeline.ranks[row]
        if span.action.model == model and span.action.kind is kind
    ]


def test_sequential_steps_are_alike_and_the_reference_comes_first() -> None:
    steps = list(RUN.steps(start=1))
    assert [step.makespan for step in steps] == [REFERENCE_TIME + POLICY_TIME] * 3
    assert _times(steps[0], 0, "reference", Kind.FORWARD) == [(0, 0.0), (1, 1.0)]
    assert _times(steps[0], 1, "reference", Kind.FORWARD) == [(0, 1.0), (1, 2.0)]
    assert _times(steps[0], 0, "actor", Kind.FORWARD)[0] == (0, REFERENCE_TIME)


def test_without_a_reference_the_policy_is_alone() -> None:
    steps = list(replace(RUN, reference=None).steps())
    assert [step.makespan for step in steps] == [POLICY_TIME] * 4


def test_time_shared_steps_run_every_reference_forward_once() -> None:
    steps = list(replace(RUN, placement="time_shared").steps(start=1))
    for row in (0, 1):
        ran = []
        for number, step in enumerate(steps):
            found = _times(step, row, "reference", Kind.FORWARD)
            ran += [2 * number + microbatch for microbatch, _ in found]
        assert sorted(ran) == list(range(2 * len(steps)))
    assert sum(step.makespan for step in steps) < sum(step.makespan for step in RUN.steps(start=1))


def test_a_concurrent_reference_is_a_batch_ahead_on_rows_of_its_own() -> None:
    reference = _model("reference", ParallelPlan(pipeline=2, data=2), first=2, num_microbatches=1)
    run = replace(RUN, reference=reference, placement="concurrent")
    assert run.rows == [0, 1, 2, 4]
    assert run.row_names == ("rank 0", "rank 1", "rank 2", "rank 4")
    first, second, third, last = run.steps()
    # One microbatch passes two ranks before the policy can begin, then the next batch's does.
    assert _times(first, 2, "reference", Kind.FORWARD) == [(0, 0.0), (0, 2.0)]
    assert _times(first, 3, "reference", Kind.FORWARD) == [(0, 1.0), (0, 3.0)]
    assert _times(first, 0, "actor", Kind.FORWARD)[0] == (0, 2.0)
    assert (first.makespan, second.makespan) == (2 + POLICY_TIME, POLICY_TIME)
    assert _times(second, 2, "reference", Kind.FORWARD) == [(0, 0.0)]
    assert third == second
    assert last.ranks[2] == last.ranks[3] == ()


@pytest.mark.parametrize(
    ("policy", "reference", "rows"),
    [
        (ParallelPlan(pipeline=4), ParallelPlan(pipeline=2, data=2), [0, 1, 2, 3]),
        (ParallelPlan(pipeline=2, tensor=2), ParallelPlan(pipeline=4), [0, 1, 2, 3]),
        (ParallelPlan(pipeline=2, data=3), ParallelPlan(pipeline=3, data=2), [0, 2, 3, 4]),
        (ParallelPlan(data=4), ParallelPlan(tensor=4), [0]),
    ],
)
def test_a_row_is_a_set_of_ranks_that_hold_the_same_parts(
    policy: ParallelPlan, reference: ParallelPlan, rows: list[int]
) -> None:
    run = replace(
        RUN,
        policy=_model("actor", policy),
        reference=_model("reference", reference),
        costs={"actor": uniform(4, 1.0, 2.0), "reference": uniform(4, 1.0)},
    )
    assert run.rows == rows
    step = next(run.steps())
    for row, rank in enumerate(rows):
        for model, plan in (("actor", policy), ("reference", reference)):
            part = rank // (plan.data * plan.tensor)
            times = _times(step, row, model, Kind.FORWARD)
            assert len(times) == 2
            if model == "reference":
                assert times[0] == (0, float(part))
    named = tuple(f"P{number}" for number in range(len(rows)))
    assert (run.row_names == named) == (policy.pipeline == len(rows))


def test_interleaved_chunks_are_kept() -> None:
    plan = ParallelPlan(pipeline=2, virtual_pipeline=2)
    run = replace(
        RUN,
        policy=_model("actor", plan),
        reference=_model("reference", plan),
        costs={"actor": uniform(4, 1.0, 2.0), "reference": uniform(4, 1.0)},
    )
    chunks = [s.action.chunk for s in next(run.steps()).ranks[0] if s.action.model == "actor"]
    assert sorted(chunks) == [0] * 4 + [1] * 4
