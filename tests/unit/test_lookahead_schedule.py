"""A reference one batch ahead: the bound it comes close to, and what must hold of every run."""

import itertools
from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from puzzle_align.schedules.actions import Action, Kind, Program
from puzzle_align.schedules.costs import ModelCosts
from puzzle_align.schedules.dependencies import Dependencies
from puzzle_align.schedules.lookahead import LookaheadStep, lookahead_step, most_held
from puzzle_align.schedules.lowering import lower
from puzzle_align.schedules.registry import schedule_for
from puzzle_align.schedules.timeshare import one_after_the_other
from puzzle_align.schedules.timing import timeline_of
from tests.costs import uniform, validated_peaks

GRID = [
    pytest.param(ranks, k * ranks, marks=pytest.mark.slow if ranks * k > 16 else ())
    for ranks in (2, 4, 8, 16)
    for k in (1, 2, 4)
]


def steps(
    num_ranks: int, counts: list[int], costs: dict[str, ModelCosts], num_chunks: int = 1
) -> list[LookaheadStep]:
    """A run of as many steps as there are ``counts`` of microbatches."""
    made: list[LookaheadStep] = []
    for count, num_next in zip(counts, [*counts[1:], 0], strict=True):
        train = Program("actor", count, num_chunks)
        done = made[-1].done if made else ()
        made.append(
            lookahead_step(
                train, "reference", num_next, num_ranks=num_ranks, costs=costs, done=done
            )
        )
    return made


@pytest.mark.parametrize(("num_ranks", "num_microbatches"), GRID)
@pytest.mark.parametrize("backward", [2, 3])
def test_the_steady_state_is_near_the_bound(
    num_ranks: int, num_microbatches: int, backward: int
) -> None:
    costs = {"actor": uniform(num_ranks, 1, backward), "reference": uniform(num_ranks, 1)}
    made = steps(num_ranks, [num_microbatches] * 9, costs)
    period = sum(step.makespan for step in made[4:8]) / 4
    pipeline = num_microbatches + num_ranks - 1
    shortest = max(pipeline * (1 + backward), num_microbatches * (2 + backward))
    assert shortest / period >= (0.99 if num_microbatches == num_ranks else 0.95)
    if num_microbatches == num_ranks:  # 1.33 where b = 2f, 1.25 where b = 3f
        speed_up = pipeline * (2 + backward) / period
        assert speed_up == pytest.approx({2: 4 / 3, 3: 5 / 4}[backward], rel=0.01)


def test_the_lookahead_model_goes_on_over_the_end_of_a_step() -> None:
    """Four ranks, sixteen microbatches, b = 2f: no rank ever waits, which one step cannot do."""
    costs = {"actor": uniform(4, 1, 2), "reference": uniform(4, 1)}
    step = steps(4, [16] * 8, costs)[5]
    assert step.makespan == 16 * 4  # the work alone
    assert 0 < step.done[-1] < 16


def test_a_forward_may_outlast_its_gap() -> None:
    """Two ranks, four microbatches: no step is below 15, and 15.7 if all forwards have to fit."""
    costs = {"actor": uniform(2, 1, 2), "reference": uniform(2, 0.7)}
    made = steps(2, [4] * 9, costs)
    assert sum(step.makespan for step in made[4:8]) / 4 == pytest.approx(15.2)


def test_the_time_by_which_forwards_outlast_their_gaps_is_chosen() -> None:
    """Half gives steps of 21, of which 20 are work; less gives 25, and three quarters 23.5."""
    costs = {"actor": ModelCosts((1.0, 1.0), (3.0, 1.0)), "reference": ModelCosts((1.0, 3.0))}
    made = steps(2, [4] * 9, costs)
    assert sum(step.makespan for step in made[4:8]) / 4 == 21


times = st.floats(0.2, 4.0)
Run = tuple[int, list[int], dict[str, ModelCosts], int]


SMALL = [(ranks, 1) for ranks in range(1, 9)] + [(2, 2), (3, 3)]
LARGE = [(ranks, 1) for ranks in (9, 12, 16)] + [(8, 2)]


@st.composite
def runs(draw: st.DrawFn, sizes: list[tuple[int, int]] = SMALL, most: int = 12) -> Run:
    """Uneven positions, another number of microbatches in every step, interleaved models too."""
    num_ranks, num_chunks = draw(st.sampled_from(sizes))
    multiple = num_ranks if num_chunks > 1 else 1
    counts = draw(st.lists(st.integers(1, most // multiple), min_size=1, max_size=6))

    def each() -> tuple[float, ...]:
        return tuple(draw(times) for _ in range(num_ranks * num_chunks))

    costs = {"actor": ModelCosts(each(), each()), "reference": ModelCosts(each())}
    return num_ranks, [count * multiple for count in counts], costs, num_chunks


@pytest.mark.parametrize(
    ("number", "kind"),
    [
        pytest.param(10, runs(), id="any"),
        pytest.param(2, runs(sizes=LARGE, most=64), id="long", marks=pytest.mark.slow),
    ],
)
def test_any_run(number: int, kind: st.SearchStrategy[Run]) -> None:
    settings(max_examples=number)(given(kind)(_check))()


def _check(case: Run) -> None:
    num_ranks, counts, _, num_chunks = case
    made = steps(*case)
    for place in range(num_ranks * num_chunks):
        chunk, rank = divmod(place, num_ranks)
        ran, first = [], 0
        for step, count in zip(made, counts, strict=True):
            order = [a.microbatch for a in _forwards(step.lists[rank], "reference", chunk)]
            ran += [first + number for number in order]
            first += count
            own = _forwards(step.lists[rank], "actor", chunk)
            assert [a.microbatch for a in own] == list(range(count))
        assert ran == list(range(sum(counts)))
    for step in made:  # what validate has proven before; its peaks are the training's own
        assert step.programs[0].reads == "reference"
        train = replace(step.programs[0], reads=None)
        own = lower(schedule_for(train, num_ranks), [train])
        expected = validated_peaks(own, [train])
        assert validated_peaks(step.lists, step.programs) == expected
        held = (before - own for before, own in itertools.pairwise(step.done))
        assert all(0 <= number <= most_held(num_ranks) for number in held)
    assert not any(made[-1].done)


def test_a_heavy_head_does_not_pile_up_inputs() -> None:
    """The first ranks have long bubbles, the last none: they would run the whole next batch."""
    costs = {
        "actor": ModelCosts((1.0, 1.0, 1.0, 1.9), (2.0, 2.0, 2.0, 4.7)),
        "reference": ModelCosts((1.0, 1.0, 1.0, 1.9)),
    }
    made = steps(4, [32] * 6, costs)
    held = [max(a - b for a, b in itertools.pairwise(step.done)) for step in made]
    assert max(held) <= most_held(4)


# Where the next batch is much smaller, its place in the bubbles can cost more than it saves.
SHRINKING = {
    "actor": ModelCosts((1.0, 2.0, 1.0, 1.0), (1.0,) * 4),
    "reference": ModelCosts((1.0, 0.5, 3.0, 1.0)),
}


@settings(max_examples=8)
@example((4, [3, 1], SHRINKING, 1))
@given(runs())
def test_never_slower_than_the_reference_first(case: Run) -> None:
    num_ranks, counts, costs, num_chunks = case
    total = sum(step.makespan for step in steps(*case))
    sequential = 0.0
    for count in counts:
        programs = [
            Program("reference", count, num_chunks, backward=False),
            Program("actor", count, num_chunks),
        ]
        timeline = timeline_of(
            one_after_the_other(programs, num_ranks), Dependencies(programs, num_ranks), costs
        )
        sequential += timeline.makespan
    assert total <= sequential * (1 + 1e-9)


def _forwards(actions: list[Action], model: str, chunk: int = 0) -> list[Action]:
    return [a for a in actions if (a.model, a.kind, a.chunk) == (model, Kind.FORWARD, chunk)]
