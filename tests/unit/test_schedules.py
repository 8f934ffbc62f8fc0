"""Schedules: golden lists, Megatron's order, and what a second interpreter makes of them."""

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from puzzle_align.schedules.actions import Action, Edge, Kind, Program, edge_of
from puzzle_align.schedules.costs import ModelCosts
from puzzle_align.schedules.dependencies import Dependencies
from puzzle_align.schedules.lowering import lower, receive_for
from puzzle_align.schedules.registry import (
    forward_only,
    gpipe,
    interleaved,
    one_f_one_b,
    schedule_for,
)
from puzzle_align.schedules.timing import timeline_of
from tests.costs import validated_peaks
from tests.unit.schedule_csv import from_csv, parse_action, to_csv
from tests.unit.value_interpreter import Held, run_with_values

GOLDEN = Path(__file__).parents[1] / "golden"
names = st.from_regex(r"[A-Za-z_][A-Za-z0-9_-]{0,8}", fullmatch=True)
numbers = st.integers(0, 1000)
actions = st.builds(Action, names, st.sampled_from(Kind), numbers, numbers)


@given(st.lists(st.lists(actions, max_size=5), max_size=5))
def test_text_forms_round_trip(lists: list[list[Action]]) -> None:
    assert from_csv(to_csv(lists)) == lists


def test_text_form_is_what_it_says() -> None:
    assert parse_action("actor:RF3.1") == Action("actor", Kind.RECV_FORWARD, 3, 1)
    with pytest.raises(ValueError, match=r"'actor:X3.0'"):
        parse_action("actor:X3.0")


GOLDEN_SCHEDULES = {
    "1f1b_p4_m4": one_f_one_b("actor", 4, 4),
    "1f1b_p4_m8": one_f_one_b("actor", 4, 8),
    "gpipe_p4_m4": gpipe("actor", 4, 4),
    "interleaved_p2_v2_m4": interleaved("actor", 2, 4, 2),
    "interleaved_p4_v2_m8": interleaved("actor", 4, 8, 2),
    "lowered_1f1b_p2_m2": lower(one_f_one_b("actor", 2, 2), [Program("actor", 2)]),
}


@pytest.mark.parametrize("name", GOLDEN_SCHEDULES)
def test_golden(name: str) -> None:
    assert to_csv(GOLDEN_SCHEDULES[name]) == (GOLDEN / f"{name}.csv").read_text()


def megatron_rank(num_ranks: int, rank: int, num_microbatches: int, num_chunks: int) -> list[str]:
    """The order of megatron.core.pipeline_parallel.schedules 0.16, restated from its rules.

    Virtual microbatch k: get_model_chunk_id = (k mod P*V) // P (mirrored for backward), its
    microbatch (k // P*V) * P + k mod P; warm-up (P-rank-1)*2 + (V-1)*P.
    """

    def step(k: int, kind: str) -> str:
        in_group = k % (num_ranks * num_chunks)
        chunk = in_group // num_ranks
        if kind == "B":
            chunk = num_chunks - chunk - 1
        microbatch = k // (num_ranks * num_chunks) * num_ranks + in_group % num_ranks
        return f"m:{kind}{microbatch}.{chunk}"

    total = num_microbatches * num_chunks
    warmup = min((num_ranks - rank - 1) * 2 + (num_chunks - 1) * num_ranks, total)
    order = [step(k, "F") for k in range(warmup)]
    for k in range(total - warmup):
        order += [step(k + warmup, "F"), step(k, "B")]
    return order + [step(k, "B") for k in range(total - warmup, total)]


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("num_chunks", [2, 3, 4])
def test_interleaved_is_megatrons(num_ranks: int, groups: int, num_chunks: int) -> None:
    lists = interleaved("m", num_ranks, groups * num_ranks, num_chunks)
    for rank, actions in enumerate(lists):
        expected = megatron_rank(num_ranks, rank, groups * num_ranks, num_chunks)
        assert [str(action) for action in actions] == expected


def test_interleaved_needs_whole_groups() -> None:
    with pytest.raises(ValueError, match=r"6 microbatches on 4 pipeline ranks"):
        interleaved("m", 4, 6, 2)


sizes = st.tuples(st.integers(1, 8), st.integers(1, 32), st.integers(1, 4))


@settings(max_examples=30)
@given(sizes)
def test_forward_only(size: tuple[int, int, int]) -> None:
    ranks, microbatches, chunks = size
    program = Program(model="m", num_microbatches=microbatches, num_chunks=chunks, backward=False)
    lists = lower(forward_only("m", ranks, microbatches, chunks), [program])
    assert validated_peaks(lists, [program]) == [0] * ranks
    run_with_values(lists, {"m": chunks})


@settings(max_examples=30)
@given(sizes)
def test_one_f_one_b_peaks(size: tuple[int, int, int]) -> None:
    ranks, microbatches, _ = size
    program = Program(model="m", num_microbatches=microbatches)
    lists = lower(one_f_one_b("m", ranks, microbatches), [program])
    peaks = validated_peaks(lists, [program])
    assert peaks == [min(microbatches, ranks - rank) for rank in range(ranks)]
    run_with_values(lists, {"m": 1})


@settings(max_examples=30)
@given(st.integers(1, 8), st.integers(1, 4), st.integers(2, 4))
def test_interleaved_peaks(ranks: int, groups: int, chunks: int) -> None:
    microbatches = groups * ranks
    program = Program(model="m", num_microbatches=microbatches, num_chunks=chunks)
    lists = lower(interleaved("m", ranks, microbatches, chunks), [program])
    total = microbatches * chunks
    # One forward more than the warm-up, unless the warm-up is everything.
    expected = [
        min(total, 2 * (ranks - rank - 1) + (chunks - 1) * ranks + 1) for rank in range(ranks)
    ]
    assert validated_peaks(lists, [program]) == expected
    run_with_values(lists, {"m": chunks})


@settings(max_examples=50)
@given(sizes, st.booleans(), st.data())
def test_slow_ranks_have_few_inputs(
    size: tuple[int, int, int], backward: bool, data: st.DataObject
) -> None:
    """However slow: at most two of an edge, the one that it computes on among them."""
    ranks, microbatches, chunks = size
    microbatches = ranks * max(1, microbatches // ranks) if chunks > 1 else microbatches
    program = Program("m", microbatches, chunks, backward)
    lists = schedule_for(program, ranks)
    each = st.lists(st.floats(0.1, 9), min_size=ranks * chunks, max_size=ranks * chunks)
    costs = {"m": ModelCosts(tuple(data.draw(each)), tuple(data.draw(each)))}
    timeline = timeline_of(lists, Dependencies([program], ranks), costs)
    for rank, actions in enumerate(lower(lists, [program], timeline)):
        waiting: Counter[Edge] = Counter()
        for action in actions:
            receive = action
            if action.kind.is_compute:
                found = receive_for(action, rank, ranks, program)
                if found is None:
                    continue
                receive = found
            elif action.kind.is_send:
                continue
            edge = edge_of(receive, rank, ranks)
            waiting[edge] += -1 if action.kind.is_compute else 1
            assert waiting[edge] <= 2


def test_two_models_one_after_the_other() -> None:
    first, second = forward_only("reference", 4, 3), one_f_one_b("actor", 4, 5)
    lists = [a + b for a, b in zip(first, second, strict=True)]
    programs = [
        Program(model="reference", num_microbatches=3, backward=False),
        Program(model="actor", num_microbatches=5),
    ]
    lists = lower(lists, programs)
    assert validated_peaks(lists, programs) == [4, 3, 2, 1]
    run_with_values(lists, {"reference": 1, "actor": 1})


@st.composite
def lookahead_models(draw: st.DrawFn) -> tuple[Program, list[tuple[Program, list[list[Action]]]]]:
    """A forward-only model over several lists, in each of which a rank gets as far as it happens.

    In the last one it runs all that is left.
    """
    num_ranks, chunks = draw(st.sampled_from([(1, 1), (2, 1), (4, 1), (2, 2), (3, 3)]))
    whole = Program("m", draw(st.integers(1, 3)) * num_ranks, chunks, backward=False)
    order = forward_only("m", num_ranks, whole.num_microbatches, chunks)[0]
    num_lists = draw(st.integers(1, 4))
    done = [[0] * chunks for _ in range(num_ranks)]
    parts = []
    for number in range(num_lists):
        begun = [list(own) for own in done]
        stops = [draw(st.integers(0, len(order))) for _ in range(num_ranks)]
        if number == num_lists - 1:
            stops = [len(order)] * num_ranks
        lists: list[list[Action]] = [[] for _ in range(num_ranks)]
        for _ in range(num_ranks * chunks):  # a pass for every time around
            for rank in range(num_ranks):
                for action in order[sum(done[rank]) : stops[rank]]:
                    position = action.chunk * num_ranks + rank
                    before = done[(rank - 1) % num_ranks][(position - 1) // num_ranks]
                    if position and before <= action.microbatch:
                        break
                    lists[rank].append(action)
                    done[rank][action.chunk] += 1
        windows = tuple(
            range(begun[rank][chunk], done[rank][chunk])
            for chunk in range(chunks)
            for rank in range(num_ranks)
        )
        parts.append((replace(whole, windows=windows), lists))
    return whole, parts


@settings(max_examples=100)
@given(lookahead_models())
def test_a_lookahead_model_over_several_lists(
    frozen: tuple[Program, list[tuple[Program, list[list[Action]]]]],
) -> None:
    whole, parts = frozen
    held: Held = {}
    for program, lists in parts:
        lowered = lower(lists, [program])
        assert validated_peaks(lowered, [program]) == [0] * len(lists)
        held = run_with_values(lowered, {"m": whole.num_chunks}, held)
    assert not held


def test_what_is_held_is_received_when_it_is_sent() -> None:
    """Rank 1 has two forwards, rank 0 four, of which two are received at the end."""
    frozen = Program("m", 6, backward=False, windows=(range(2, 6), range(1, 3)))
    lists = lower(from_csv("m:F2.0,m:F3.0,m:F4.0,m:F5.0\nm:F1.0,m:F2.0\n"), [frozen])
    assert to_csv(lists).splitlines()[1] == "m:RF2.0,m:F1.0,m:RF3.0,m:F2.0,m:RF4.0,m:RF5.0"
