"""Time-sharing: the paper's schedules, its speed-up, and what must hold of any set of models."""

from pathlib import Path

import pytest
from hypothesis import given, settings

from puzzle_align.schedules.actions import Kind, Program
from puzzle_align.schedules.costs import Costs
from puzzle_align.schedules.dependencies import Dependencies
from puzzle_align.schedules.lowering import lower
from puzzle_align.schedules.registry import forward_only
from puzzle_align.schedules.timeline import Timeline
from puzzle_align.schedules.timeshare import one_after_the_other, time_share
from puzzle_align.schedules.timing import timeline_of
from puzzle_align.schedules.validate import validate
from tests.costs import uniform
from tests.unit.schedule_csv import parse_action, to_csv
from tests.unit.schedule_strategies import Workload, workloads

GOLDEN = Path(__file__).parents[1] / "golden"
GRID = [
    (ranks, k * ranks, ratio)
    for ranks in (2, 4, 8, 16)
    for k in (1, 2, 4)
    for ratio in (1, 2, 4, 8)
]


def timed(lists: list, programs: list[Program], costs: Costs) -> Timeline:
    return timeline_of(lists, Dependencies(programs, len(lists)), costs)


def peaks(lists: list, programs: list[Program], costs: Costs) -> list[float]:
    return Dependencies(programs, len(lists)).peaks(lists, costs)


FIGURE_5 = [Program("model1", 4), Program("model2", 4)]
FIGURE_5_COSTS = {"model1": uniform(4, 1, 1), "model2": uniform(4, 1, 1)}


def test_figure_5a() -> None:
    lists = one_after_the_other(FIGURE_5, 4)
    assert to_csv(lists) == (GOLDEN / "figure5a_p4_m4.csv").read_text()
    timeline = timed(lists, FIGURE_5, FIGURE_5_COSTS)
    first = next(s for s in timeline.ranks[0] if s.action == parse_action("model2:F0.0"))
    assert first.start == 14  # the paper counts slots from 1: its time 15
    assert [timeline.idle(rank) for rank in range(4)] == [2 * 3 * 2] * 4  # 2(P-1)(Tf+Tb)


def test_figure_5b() -> None:
    lists = time_share(FIGURE_5, 4, FIGURE_5_COSTS)
    assert to_csv(lists) == (GOLDEN / "figure5b_p4_m4.csv").read_text()
    timeline = timed(lists, FIGURE_5, FIGURE_5_COSTS)
    spans = {str(span.action): span for span in timeline.ranks[0]}
    assert spans["model2:F0.0"].start == spans["model1:B0.0"].end == 8  # the paper's time 9
    assert [timeline.idle(rank) for rank in range(4)] == [3 * 2] * 4  # (P-1)(Tf+Tb)
    assert peaks(lists, FIGURE_5, FIGURE_5_COSTS) == [4, 3, 2, 1]


def equation_1(num_ranks: int, num_microbatches: int, times: tuple[float, float]) -> float:
    pipeline = (num_microbatches + num_ranks - 1) * sum(times)
    return pipeline / (num_microbatches * sum(times) + (num_ranks - 1) * max(times))


@pytest.mark.parametrize(("num_ranks", "num_microbatches", "ratio"), GRID)
def test_two_models_reach_equation_1(num_ranks: int, num_microbatches: int, ratio: int) -> None:
    programs = [Program("actor", num_microbatches), Program("critic", num_microbatches)]
    for backward in (1, 2):  # of a forward
        costs = {
            "actor": uniform(num_ranks, ratio, ratio * backward, activation=ratio),
            "critic": uniform(num_ranks, 1, backward),
        }
        lists = time_share(programs, num_ranks, costs)
        times = (ratio * (1.0 + backward), 1.0 + backward)
        sequential = (num_microbatches + num_ranks - 1) * sum(times)
        speed_up = sequential / timed(lists, programs, costs).makespan
        bound = equation_1(num_ranks, num_microbatches, times)
        more = 1.05 if num_microbatches == num_ranks and ratio in (2, 4) else 1.0
        assert speed_up >= bound * more * (1 - 1e-12)
        before = peaks(one_after_the_other(programs, num_ranks), programs, costs)
        now = peaks(lists, programs, costs)
        assert all(a <= b for a, b in zip(now, before, strict=True))


def test_forward_only_models_form_one_pipeline() -> None:
    """Reference, reward and critic score: one fill and one drain for all three."""
    programs = [Program(name, 4, backward=False) for name in ("reference", "reward", "critic")]
    costs = {p.model: uniform(4, time) for p, time in zip(programs, (1, 2, 1), strict=True)}
    lists = time_share(programs, 4, costs)
    # A proportionate flow shop: the work of one rank and three more hops of the slowest.
    assert timed(lists, programs, costs).makespan == 4 * (1 + 2 + 1) + 3 * 2


def test_forwards_of_one_model_fill_the_bubbles_of_another() -> None:
    programs = [Program("actor", 8), Program("reference", 4, backward=False)]
    costs = {"actor": uniform(4, 1, 2), "reference": uniform(4, 1)}
    lists = time_share(programs, 4, costs)
    assert timed(lists, programs, costs).makespan == (8 + 3) * 3  # the training's own


def test_three_training_models() -> None:
    programs = [Program("actor", 8), Program("critic", 8), Program("reward", 8)]
    costs = {p.model: uniform(4, t, 2 * t) for p, t in zip(programs, (4, 2, 1), strict=True)}
    lists = time_share(programs, 4, costs)
    validate(lower(lists, programs), programs)
    # One after the other each fills and drains; here only the largest does, if any.
    assert timed(lists, programs, costs).makespan <= 8 * 3 * 7 + 3 * 3 * 4


def test_an_interleaved_model_shares_too() -> None:
    programs = [Program("actor", 8, num_chunks=2), Program("critic", 8)]
    costs = {"actor": uniform(8, 1, 2), "critic": uniform(4, 1, 2)}
    lists = time_share(programs, 4, costs)
    before = timed(one_after_the_other(programs, 4), programs, costs).makespan
    assert timed(lists, programs, costs).makespan < before
    validate(lower(lists, programs), programs)


def test_alone_is_alone() -> None:
    lists = time_share([Program("m", 3, backward=False)], 2, {"m": uniform(2, 1)})
    assert lists == forward_only("m", 2, 3)


def _check(workload: Workload) -> None:
    num_ranks, programs, costs = workload
    lists = time_share(programs, num_ranks, costs)
    validate(lower(lists, programs), programs)
    sequential = one_after_the_other(programs, num_ranks)
    now, before = peaks(lists, programs, costs), peaks(sequential, programs, costs)
    assert all(a <= b for a, b in zip(now, before, strict=True))
    for actions in lists:
        for program in programs:
            order = [
                a.microbatch
                for a in actions
                if a.model == program.model and a.kind is Kind.FORWARD and a.chunk == 0
            ]
            assert order == list(range(program.num_microbatches))
    makespan = timed(lists, programs, costs).makespan
    assert makespan <= timed(sequential, programs, costs).makespan
    assert makespan <= sum(
        timed(one_after_the_other([p], num_ranks), [p], costs).makespan for p in programs
    ) * (1 + 1e-9)


@pytest.mark.parametrize(("number", "sizes"), [(60, (6, 12, 4)), (12, (16, 64, 3))])
def test_any_models(number: int, sizes: tuple[int, int, int]) -> None:
    settings(max_examples=number)(given(workloads(*sizes))(_check))()
