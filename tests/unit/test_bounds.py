"""What is known of a pass before it is simulated: bounds that no simulation may contradict."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from puzzle_align.layout.job_plan import Order, Phase
from puzzle_align.layout.plan import ParallelPlan
from puzzle_align.planning.iteration import least_time, steady
from puzzle_align.planning.prediction import PredictedRun, most_kept
from puzzle_align.schedules.costs import ModelCosts
from puzzle_align.schedules.timing import least_makespan
from tests.unit.job_plans import context

times = st.floats(0.1, 4.0)
CHUNKS = st.sampled_from([1, 1, 1, 2, 3])


@st.composite
def costs_of(draw: st.DrawFn, positions: int, *, train: bool) -> ModelCosts:
    def each() -> tuple[float, ...]:
        return tuple(draw(st.lists(times, min_size=positions, max_size=positions)))

    return ModelCosts(each(), each(), each()) if train else ModelCosts(each())


def run_of(
    plan: ParallelPlan,
    costs: Sequence[tuple[str, bool, ModelCosts]],
    counts: float,
    hop: float,
    order: Order,
) -> tuple[PredictedRun, dict[str, float]]:
    """Colocated models with so many microbatches each, a pass rounded up to whole ones."""
    contexts = tuple(context(r, plan, "train" if train else "infer") for r, train, _ in costs)
    unit = plan.pipeline if plan.virtual_pipeline > 1 else 1
    whole = max(1, -int(-counts // unit)) * unit
    phase = Phase(name="train", order=order, contexts=contexts)

    def transfer(role: str, source: int, destination: int) -> float:
        return hop * (1 + len(role) + 2 * source + destination)

    run = PredictedRun(
        phase=phase,
        num_microbatches={role: lambda _: whole for role, _, _ in costs},
        costs={role: own for role, _, own in costs},
        transfer=transfer,
        num_passes=7,
    )
    return run, {role: max(counts, unit) for role, _, _ in costs}


@st.composite
def unfed(draw: st.DrawFn) -> tuple[PredictedRun, dict[str, float]]:
    """One to three models that all train or all run forward."""
    pipeline = draw(st.integers(1, 5))
    chunks = draw(CHUNKS) if pipeline > 1 else 1
    plan = ParallelPlan(pipeline=pipeline, virtual_pipeline=chunks)
    train, number = draw(st.booleans()), draw(st.integers(1, 3))
    made = [(f"m{n}", train, draw(costs_of(pipeline * chunks, train=train))) for n in range(number)]
    order: Order = "sequential"
    if number > 1 and pipeline > 1 and draw(st.booleans()):
        order = "time_shared"
    counts = draw(st.floats(1, 12)) if draw(st.booleans()) else float(draw(st.integers(1, 12)))
    return run_of(plan, made, counts, draw(st.sampled_from([0.0, 0.02, 0.5])), order)


@st.composite
def fed(draw: st.DrawFn) -> tuple[PredictedRun, dict[str, float]]:
    """A frozen model ahead of a training one."""
    pipeline = draw(st.integers(2, 4))
    chunks = draw(CHUNKS)
    plan = ParallelPlan(pipeline=pipeline, virtual_pipeline=chunks)
    made = [
        ("reference", False, draw(costs_of(pipeline * chunks, train=False))),
        ("actor", True, draw(costs_of(pipeline * chunks, train=True))),
    ]
    counts = float(draw(st.integers(1, 8)))
    return run_of(plan, made, counts, draw(st.sampled_from([0.0, 0.1])), "time_shared")


@settings(max_examples=200)
@given(unfed())
def test_no_pass_is_faster_than_its_bound(case: tuple[PredictedRun, dict[str, float]]) -> None:
    run, counts = case
    assert least_time(run, counts) <= steady(run, counts)[0] * (1 + 1e-9)


@settings(max_examples=60)
@given(fed())
def test_no_step_with_a_model_ahead_is_faster_than_its_bound(
    case: tuple[PredictedRun, dict[str, float]],
) -> None:
    run, counts = case
    assert least_time(run, counts) <= steady(run, counts)[0] * (1 + 1e-9)


@settings(max_examples=150)
@given(unfed() | fed())
def test_no_rank_is_proven_to_keep_more_than_is_known_before(
    case: tuple[PredictedRun, dict[str, float]],
) -> None:
    run, _ = case
    known = most_kept(run)
    proven = run.peak_activations()
    assert known.keys() == proven.keys()
    for role, kept in proven.items():
        assert all(a <= b * (1 + 1e-9) for a, b in zip(kept, known[role], strict=True))


@given(costs_of(6, train=True), st.integers(3, 6))
def test_later_groups_of_an_interleaved_model_keep_no_more(costs: ModelCosts, groups: int) -> None:
    plan = ParallelPlan(pipeline=3, virtual_pipeline=2)
    run, _ = run_of(plan, [("actor", True, costs)], 9.0, 0.0, "sequential")
    more = replace(run, num_microbatches={"actor": lambda _: 3 * groups})
    assert more.peak_activations()["actor"] == pytest.approx(run.peak_activations()["actor"])


def test_transfers_count_until_the_first_has_come_and_the_last_has_gone() -> None:
    costs = ModelCosts((1.0, 2.0, 3.0), (2.0, 4.0, 6.0))
    hops = (0.5, 0.25), (0.125, 1.0)
    # Rank 2: two hops and two forwards before, its own work, two hops and two backwards after.
    assert least_makespan([costs], [2], 3, [hops]) == (1 + 2 + 0.75) + 2 * 9 + (2 + 4 + 1.125)
    assert least_makespan([costs], [2], 3) == (1 + 2) + 2 * 9 + (2 + 4)
    forward = ModelCosts((3.0, 2.0, 1.0))
    assert least_makespan([forward], [4], 3, [hops]) == 4 * 3 + (2 + 1 + 0.75)
