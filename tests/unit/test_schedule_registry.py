"""Every schedule by name: proven, run with values, and as its row says."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from puzzle_align.layout.plan import ParallelPlan, plan_problems
from puzzle_align.planning.prediction import PredictedRun, most_kept
from puzzle_align.schedules.actions import Program
from puzzle_align.schedules.costs import ModelCosts
from puzzle_align.schedules.lookahead import lookahead_step
from puzzle_align.schedules.lowering import lower
from puzzle_align.schedules.registry import SCHEDULES, schedule_for, schedule_problem
from puzzle_align.schedules.timeshare import one_after_the_other, time_share
from puzzle_align.schedules.validate import validate
from tests.costs import uniform, validated_peaks
from tests.unit.job_plans import context, phase_of
from tests.unit.value_interpreter import run_with_values


def program_of(name: str, ranks: int, microbatches: int, more_chunks: int = 0) -> Program:
    """A program that the schedule takes; ``microbatches`` in groups of P where it wants them."""
    row = SCHEDULES[name]
    chunks = row.least_chunks + (more_chunks if row.most_chunks is None else 0)
    number = microbatches * ranks if row.in_groups else microbatches
    return Program("m", number, chunks, schedule=name)


@pytest.mark.parametrize("name", SCHEDULES)
@settings(max_examples=30)
@given(ranks=st.integers(1, 6), microbatches=st.integers(1, 20), more=st.integers(0, 2))
def test_schedules_compute_each_microbatch(
    name: str, ranks: int, microbatches: int, more: int
) -> None:
    program = program_of(name, ranks, microbatches, more)
    lists = lower(schedule_for(program, ranks), [program])
    validate(lists, [program])
    run_with_values(lists, {"m": program.num_chunks})


@pytest.mark.parametrize("name", SCHEDULES)
def test_peaks_grow_with_the_microbatches_where_a_rank_holds_all(name: str) -> None:
    ranks, row = 4, SCHEDULES[name]

    def peaks(groups: int) -> list[float]:
        number = groups if row.in_groups else groups * ranks
        program = program_of(name, ranks, number)
        return validated_peaks(lower(schedule_for(program, ranks), [program]), [program])

    assert peaks(3) == peaks(6) or row.holds_all
    if row.holds_all:
        assert peaks(6) == [2 * peak for peak in peaks(3)] == [6 * ranks] * ranks


@pytest.mark.parametrize("name", SCHEDULES)
def test_time_sharing_and_lookahead_compose_it(name: str) -> None:
    ranks = 3
    trained = program_of(name, ranks, 3)
    positions = ranks * trained.num_chunks
    costs: dict[str, ModelCosts] = {"m": uniform(positions, 1, 2), "frozen": uniform(positions, 1)}
    programs = [trained, Program("frozen", trained.num_microbatches, trained.num_chunks, False)]
    alone = schedule_for(trained, ranks)
    lists = time_share(programs, ranks, costs)
    peaks = validated_peaks(lower(lists, programs), programs)
    assert peaks == validated_peaks(lower(one_after_the_other(programs, ranks), programs), programs)
    step = lookahead_step(trained, "frozen", 3, num_ranks=ranks, costs=costs)
    for made in (lists, step.lists):
        for rank, actions in enumerate(made):
            of_trained = [a for a in actions if a.model == "m" and a.kind.is_compute]
            assert of_trained == alone[rank]


def test_two_trained_models_keep_orders_that_do_not_merge() -> None:
    """List scheduling would run a backward amid GPipe's forwards."""
    ranks, costs = 4, {"actor": uniform(4, 2, 4), "critic": uniform(4, 1, 2)}
    programs = [Program(model, 6, schedule="gpipe") for model in costs]
    lists = time_share(programs, ranks, costs)
    for program in programs:
        alone = schedule_for(program, ranks)
        assert [[a for a in made if a.model == program.model] for made in lists] == alone


@pytest.mark.parametrize("name", SCHEDULES)
def test_predicted_memory_counts_what_the_schedule_keeps(name: str) -> None:
    ranks, trained = 2, program_of(name, 2, 8)
    plan = ParallelPlan(pipeline=2, virtual_pipeline=trained.num_chunks, schedule=name)
    positions = plan.num_positions
    run = PredictedRun(
        phase=phase_of(context("actor", plan)),
        num_microbatches={"actor": lambda _: trained.num_microbatches},
        costs={"actor": uniform(positions, 1, 2, activation=10)},
    )
    lists = lower(schedule_for(trained, ranks), [trained])
    peaks = validated_peaks(lists, [trained])
    assert most_kept(run)["actor"] == tuple(10 * peak for peak in peaks)


def test_without_a_name_the_chunks_decide() -> None:
    for chunks, name in ((1, "1f1b"), (2, "interleaved"), (3, "interleaved")):
        assert schedule_for(Program("m", 4, chunks), 2) == schedule_for(
            Program("m", 4, chunks, schedule=name), 2
        )
    plans = [ParallelPlan(pipeline=3, virtual_pipeline=chunks) for chunks in (1, 2)]
    assert [plan.microbatch_multiple for plan in plans] == [1, 3]


def test_problems_name_the_key_and_the_cure() -> None:
    assert schedule_problem(None, 3) is None
    assert schedule_problem("interleaved", 2) is None
    assert schedule_problem("1f1b", 1) is None
    plan = ParallelPlan(pipeline=2, schedule="interleaved")
    assert list(plan_problems(plan, "actor.parallel")) == [
        "actor.parallel.pipeline_schedule: interleaved does not run 1 model chunk a pipeline rank; "
        "set virtual_pipeline_model_parallel_size to 2 or more"
    ]
    assert schedule_problem("1f1b", 2) == (
        "1f1b does not run 2 model chunks a pipeline rank; "
        "set virtual_pipeline_model_parallel_size to 1"
    )
    names = ", ".join(SCHEDULES)
    assert schedule_problem("2f2b", 1) == f"'2f2b' is not a schedule; choose one of {names}"
