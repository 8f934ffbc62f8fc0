"""Simulated timelines: derived by hand, and against an interpreter that asks backwards."""

import sys
from collections.abc import Sequence
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from puzzle_align.schedules.actions import Action, Edge, Kind, Program, edge_of
from puzzle_align.schedules.costs import Costs, ModelCosts
from puzzle_align.schedules.dependencies import Dependencies
from puzzle_align.schedules.lookahead import lookahead_step
from puzzle_align.schedules.lowering import lower
from puzzle_align.schedules.registry import forward_only, one_f_one_b, schedule_for
from puzzle_align.schedules.timeline import Timeline
from puzzle_align.schedules.timeshare import one_after_the_other, time_share
from puzzle_align.schedules.timing import simulate, timeline_of
from puzzle_align.schedules.validate import validate
from tests.costs import uniform
from tests.unit.schedule_csv import from_csv

STREAM = Program("m", 2, backward=False)


def times(timeline: Timeline) -> list[list[tuple[str, float, float]]]:
    return [[(str(s.action), s.start, s.end) for s in spans] for spans in timeline.ranks]


def starts(timeline: Timeline) -> list[list[float]]:
    return [[span.start for span in spans] for spans in timeline.ranks]


@pytest.mark.parametrize(("num_ranks", "num_microbatches"), [(1, 3), (2, 2), (4, 4), (4, 16)])
def test_1f1b_is_idle_while_it_fills_and_drains(num_ranks: int, num_microbatches: int) -> None:
    lists = lower(one_f_one_b("m", num_ranks, num_microbatches), [Program("m", num_microbatches)])
    timeline = simulate(lists, {"m": uniform(num_ranks, 1, 2)})
    assert timeline.makespan == (num_microbatches + num_ranks - 1) * 3
    assert [timeline.idle(rank) for rank in range(num_ranks)] == [(num_ranks - 1) * 3] * num_ranks
    assert (
        timeline.idle_share() == timeline.idle_share(0) == (num_ranks - 1) * 3 / timeline.makespan
    )


def test_interleaving_divides_the_idle_time_by_the_chunks() -> None:
    program = Program("m", 8, num_chunks=2)
    timeline = simulate(lower(schedule_for(program, 4), [program]), {"m": uniform(8, 1, 2)})
    assert timeline.makespan == 8 * 2 * 3 + (4 - 1) * 3
    assert timeline.idle(0) == (4 - 1) * 3


def test_1f1b_with_transfers_by_hand() -> None:
    """Half a unit for a transfer.

    Rank 1 posts the receive of microbatch 1 when its first forward has ended (2.5); what was sent
    at 2 then takes until 3. A gradient takes half a unit each time rank 0 waits for it.
    """
    lists = lower(one_f_one_b("m", 2, 2), [Program("m", 2)])
    timeline = simulate(lists, {"m": uniform(2, 1, 2)}, transfer=0.5)
    assert times(timeline) == [
        [("m:F0.0", 0, 1), ("m:F1.0", 1, 2), ("m:B0.0", 5, 7), ("m:B1.0", 8, 10)],
        [("m:F0.0", 1.5, 2.5), ("m:B0.0", 2.5, 4.5), ("m:F1.0", 4.5, 5.5), ("m:B1.0", 5.5, 7.5)],
    ]


def test_a_receive_that_is_posted_late_puts_the_transfer_off() -> None:
    costs = {"m": uniform(2, 1)}
    first = "m:F0.0,m:SF0.0,m:F1.0,m:SF1.0\n"
    early = from_csv(f"{first}m:RF0.0,m:RF1.0,m:F0.0,m:F1.0\n")
    assert starts(simulate(early, costs, transfer=0.5)) == [[0, 1], [1.5, 2.5]]
    late = from_csv(f"{first}m:RF0.0,m:F0.0,m:RF1.0,m:F1.0\n")  # posted at 2.5: there at 3
    assert starts(simulate(late, costs, transfer=0.5)) == [[0, 1], [1.5, 3]]


def test_an_edge_carries_one_transfer_after_the_other() -> None:
    """Two units each: the first from 1 to 3, the second not from 2 but from 3 to 5."""
    lists = lower(forward_only("m", 2, 2), [STREAM])
    assert starts(simulate(lists, {"m": uniform(2, 1)}, transfer=2)) == [[0, 1], [3, 5]]


def test_a_rank_that_is_busy_elsewhere_holds_two_inputs() -> None:
    """It is free at 13, and has an input less at 14: the third then takes two units."""
    lists = from_csv("b:F0.0,a:F0.0,a:F1.0,a:F2.0\n" * 2)
    programs = [Program("b", 1, backward=False), Program("a", 3, backward=False)]
    costs = {"b": ModelCosts((1.0, 10.0)), "a": uniform(2, 1)}
    timeline = timeline_of(lists, Dependencies(programs, 2), costs, 2.0)
    assert starts(timeline) == [[0, 1, 2, 3], [3, 13, 14, 16]]
    assert simulate(lower(lists, programs, timeline), costs, transfer=2) == timeline


def test_edges_do_not_share_a_link() -> None:
    """Two models' transfers cross together: from 1 to 5, and from 2 to 6."""
    lists = from_csv("a:F0.0,a:SF0.0,b:F0.0,b:SF0.0\na:RF0.0,b:RF0.0,a:F0.0,b:F0.0\n")
    costs = {"a": uniform(2, 1), "b": uniform(2, 1)}
    assert starts(simulate(lists, costs, transfer=4)) == [[0, 1], [5, 6]]


def test_links_differ() -> None:
    def transfer(model: str, source: int, destination: int) -> float:
        assert model == "m"
        return {(0, 1): 0.25, (1, 2): 4.0}[source, destination]

    program = Program("m", 1, backward=False)
    lists = lower(forward_only("m", 3, 1), [program])
    assert starts(simulate(lists, {"m": uniform(3, 1)}, transfer=transfer)) == [[0], [1.25], [6.25]]


def test_held_inputs_are_there_from_the_start() -> None:
    frozen = Program("m", 4, backward=False, windows=(range(2, 4), range(1, 3)))
    lists = lower(from_csv("m:F2.0,m:F3.0\nm:F1.0,m:F2.0\n"), [frozen])
    validate(lists, [frozen])
    timeline = simulate(lists, {"m": uniform(2, 1)}, transfer=0.5)
    assert starts(timeline) == [[0, 1], [0, 1.5]]


def test_a_rank_may_have_nothing_to_do() -> None:
    assert simulate([[], []], {}).makespan == 0


def asked_backwards(
    lists: Sequence[Sequence[Action]], costs: Costs, transfer: float
) -> list[list[tuple[float, float]]]:
    """Start and end of the compute actions, each time asked of what comes before it."""
    sides: dict[tuple[Edge, bool], list[tuple[int, int]]] = {}
    receives: dict[tuple[int, Action], tuple[Edge, int]] = {}
    for rank, actions in enumerate(lists):
        for index, action in enumerate(actions):
            if action.kind.is_compute:
                continue
            edge = edge_of(action, rank, len(lists))
            side = sides.setdefault((edge, action.kind.is_send), [])
            if not action.kind.is_send:
                receives[rank, action] = edge, len(side)
            side.append((rank, index))

    @cache
    def arrival(edge: Edge, number: int) -> float:
        sent, awaited = (sides[edge, is_send][number] for is_send in (True, False))
        before = arrival(edge, number - 1) if number else 0.0
        return max(end(*sent), end(*awaited), before) + transfer

    @cache
    def start(rank: int, index: int) -> float:
        action, before = lists[rank][index], end(rank, index - 1) if index else 0.0
        if not action.kind.is_compute:
            return before
        forward = action.kind is Kind.FORWARD
        kind = Kind.RECV_FORWARD if forward else Kind.RECV_BACKWARD
        receive = Action(action.model, kind, action.microbatch, action.chunk)
        coming = receives.get((rank, receive))
        return before if coming is None else max(before, arrival(*coming))

    @cache
    def end(rank: int, index: int) -> float:
        action = lists[rank][index]
        if not action.kind.is_compute:
            return start(rank, index)
        return start(rank, index) + costs[action.model].of(action, rank, len(lists))

    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(100_000)
    try:
        return [
            [(start(r, i), end(r, i)) for i, a in enumerate(actions) if a.kind.is_compute]
            for r, actions in enumerate(lists)
        ]
    finally:
        sys.setrecursionlimit(limit)


durations = st.floats(0.1, 4.0)


def some_costs(num_positions: int) -> st.SearchStrategy[ModelCosts]:
    each = st.lists(durations, min_size=num_positions, max_size=num_positions).map(tuple)
    return st.builds(ModelCosts, each, each)


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[list[Action]], list[Program], dict[str, ModelCosts]]:
    """Compute lists of a forward-only model and a training one, and their costs."""
    num_ranks, num_chunks = draw(st.sampled_from([(1, 1), (2, 1), (3, 1), (5, 1), (2, 2), (3, 2)]))
    counts = draw(st.integers(1, 3)) * num_ranks, draw(st.integers(1, 3)) * num_ranks
    programs = [
        Program("reference", counts[0], num_chunks, backward=False),
        Program("actor", counts[1], num_chunks),
    ]
    costs = {p.model: draw(some_costs(num_ranks * num_chunks)) for p in programs}
    return one_after_the_other(programs, num_ranks), programs, costs


@settings(max_examples=50)
@given(cases(), st.sampled_from([0.0, 0.3, 5.0]))
def test_any_lists(
    case: tuple[list[list[Action]], list[Program], dict[str, ModelCosts]], transfer: float
) -> None:
    lists, programs, costs = case
    lowered = lower(lists, programs)
    timeline = simulate(lowered, costs, transfer=transfer)
    found = [[(span.start, span.end) for span in spans] for spans in timeline.ranks]
    assert found == asked_backwards(lowered, costs, transfer)
    # What the simulation leaves of a list is its compute, in order.
    assert [[span.action for span in spans] for spans in timeline.ranks] == lists
    if transfer == 0:  # the schedulers' own measure, which knows no transfers
        assert timeline == timeline_of(lists, Dependencies(programs, len(lists)), costs)


@settings(max_examples=15)
@given(st.data(), st.integers(1, 5), st.sampled_from([0.0, 0.3, 5.0]))
def test_any_lookahead_model(data: st.DataObject, num_ranks: int, transfer: float) -> None:
    costs = {model: data.draw(some_costs(num_ranks)) for model in ("actor", "reference")}
    done: tuple[int, ...] = ()
    for count, num_next in [(4, 6), (6, 3), (3, 0)]:
        step = lookahead_step(
            Program("actor", count),
            "reference",
            num_next,
            num_ranks=num_ranks,
            costs=costs,
            done=done,
        )
        done = step.done
        timeline = simulate(step.lists, costs, transfer=transfer)
        found = [[(span.start, span.end) for span in spans] for spans in timeline.ranks]
        assert found == asked_backwards(step.lists, costs, transfer)
        if transfer == 0:
            assert timeline.makespan == pytest.approx(step.makespan)


@st.composite
def compositions(draw: st.DrawFn) -> tuple[int, list[Program], dict[str, ModelCosts], bool]:
    """One to three models of any kind on a pipeline, and whether they share time."""
    num_ranks, programs, costs = draw(st.integers(1, 5)), [], {}
    for number in range(draw(st.integers(1, 3))):
        chunks = draw(st.sampled_from([1, 1, 2, 3])) if num_ranks > 1 else 1
        count = draw(st.integers(1, 4)) * (num_ranks if chunks > 1 else 1)
        name, train = f"m{number}", draw(st.booleans())
        programs.append(Program(name, count, chunks, train))
        positions = num_ranks * chunks
        each = st.lists(st.floats(0.1, 5), min_size=positions, max_size=positions).map(tuple)
        costs[name] = ModelCosts(draw(each), draw(each) if train else ())
    return num_ranks, programs, costs, draw(st.booleans())


@settings(max_examples=40)
@given(compositions(), st.sampled_from([0.0, 0.3, 2.0]))
def test_compute_lists_take_what_their_lowered_ones_do(case, time: float) -> None:
    num_ranks, programs, costs, share = case
    lists = one_after_the_other(programs, num_ranks)
    if share:
        lists = time_share(programs, num_ranks, costs)

    def by_edge(model: str, source: int, destination: int) -> float:
        return time * (len(model) + source + 2 * destination)

    for transfer in (time, by_edge):
        quick = timeline_of(lists, Dependencies(programs, num_ranks), costs, transfer)
        lowered = lower(lists, programs, quick)
        validate(lowered, programs)
        assert quick.ranks == simulate(lowered, costs, transfer=transfer).ranks
