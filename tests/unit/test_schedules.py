"""Schedules: golden lists, Megatron's order, and the validator against a second interpreter."""

from collections import defaultdict, deque
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from puzzle_align.schedules.actions import Action, Kind, Program, from_csv, parse_action, to_csv
from puzzle_align.schedules.lowering import edge_of, lower
from puzzle_align.schedules.single import forward_only, interleaved, one_f_one_b
from puzzle_align.schedules.validate import validate

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
    with pytest.raises(ValueError, match=r"1 chunk a rank"):
        interleaved("m", 4, 8, 1)


def run_with_values(lists: list[list[Action]], num_chunks: dict[str, int]) -> None:
    """Interprets lowered lists with real queues and checks every value that arrives.

    A receive only takes its number in the queue; the compute action waits for that number.
    """
    num_ranks = len(lists)
    sent, posted = defaultdict(list), defaultdict(int)
    tickets: dict[tuple, tuple] = {}
    held: dict[tuple, tuple] = {}
    queues = [deque(actions) for actions in lists]

    def step(rank: int, action: Action) -> bool:
        model, kind, microbatch, chunk = action.model, action.kind, action.microbatch, action.chunk
        key = (rank, model, microbatch, chunk)
        if kind.is_send:
            compute = Kind.FORWARD if kind is Kind.SEND_FORWARD else Kind.BACKWARD
            sent[edge_of(action, rank, num_ranks)].append(held[(*key, compute)])
            return True
        if not kind.is_compute:
            edge = edge_of(action, rank, num_ranks)
            tickets[(*key, kind)] = (edge, posted[edge])
            posted[edge] += 1
            return True
        forward = kind is Kind.FORWARD
        position, last = chunk * num_ranks + rank, num_ranks * num_chunks[model] - 1
        source = position - 1 if forward else position + 1
        if source in (-1, last + 1):
            assert forward or (*key, Kind.FORWARD) in held
        else:
            if num_ranks == 1:
                value = held.get((rank, model, microbatch, source, kind))
            else:
                receive = Kind.RECV_FORWARD if forward else Kind.RECV_BACKWARD
                edge, ticket = tickets[(*key, receive)]
                value = sent[edge][ticket] if ticket < len(sent[edge]) else None
            if value is None:
                return False
            assert value == (model, kind, microbatch, source)
        assert forward or (*key, Kind.FORWARD) in held
        held[(*key, kind)] = (model, kind, microbatch, position)
        return True

    while any(queues):
        moved = False
        for rank, queue in enumerate(queues):
            while queue and step(rank, queue[0]):
                queue.popleft()
                moved = True
        assert moved, [str(queue[0]) for queue in queues if queue]
    assert {edge: len(values) for edge, values in sent.items()} == dict(posted)


sizes = st.tuples(st.integers(1, 8), st.integers(1, 32), st.integers(1, 4))


@settings(max_examples=30, deadline=None)
@given(sizes, st.integers(0, 3))
def test_forward_only(size: tuple[int, int, int], lookahead: int) -> None:
    ranks, microbatches, chunks = size
    program = Program(model="m", num_microbatches=microbatches, num_chunks=chunks, backward=False)
    lists = lower(forward_only("m", ranks, microbatches, chunks), [program], lookahead)
    assert validate(lists, [program]) == [0] * ranks
    run_with_values(lists, {"m": chunks})


@settings(max_examples=30, deadline=None)
@given(sizes, st.integers(0, 3))
def test_one_f_one_b_peaks(size: tuple[int, int, int], lookahead: int) -> None:
    ranks, microbatches, _ = size
    program = Program(model="m", num_microbatches=microbatches)
    lists = lower(one_f_one_b("m", ranks, microbatches), [program], lookahead)
    peaks = validate(lists, [program])
    assert peaks == [min(microbatches, ranks - rank) for rank in range(ranks)]
    run_with_values(lists, {"m": 1})


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 8), st.integers(1, 4), st.integers(2, 4), st.integers(0, 3))
def test_interleaved_peaks(ranks: int, groups: int, chunks: int, lookahead: int) -> None:
    microbatches = groups * ranks
    program = Program(model="m", num_microbatches=microbatches, num_chunks=chunks)
    lists = lower(interleaved("m", ranks, microbatches, chunks), [program], lookahead)
    total = microbatches * chunks
    # One forward more than the warm-up, unless the warm-up is everything.
    expected = [
        min(total, 2 * (ranks - rank - 1) + (chunks - 1) * ranks + 1) for rank in range(ranks)
    ]
    assert validate(lists, [program]) == expected
    run_with_values(lists, {"m": chunks})


def test_two_models_one_after_the_other() -> None:
    first, second = forward_only("reference", 4, 3), one_f_one_b("actor", 4, 5)
    lists = [a + b for a, b in zip(first, second, strict=True)]
    programs = [
        Program(model="reference", num_microbatches=3, backward=False),
        Program(model="actor", num_microbatches=5),
    ]
    lists = lower(lists, programs)
    assert validate(lists, programs) == [4, 3, 2, 1]
    run_with_values(lists, {"reference": 1, "actor": 1})


def lowered_pair() -> list[list[Action]]:
    return lower(one_f_one_b("m", 2, 3), [Program("m", 3)], lookahead=0)


def swap(actions: list[Action], first: str, second: str) -> None:
    i, j = actions.index(parse_action(first)), actions.index(parse_action(second))
    actions[i], actions[j] = actions[j], actions[i]


def test_validate_names_rank_and_action() -> None:
    program = Program(model="m", num_microbatches=3)

    def fails(lists: list[list[Action]], message: str) -> None:
        with pytest.raises(ValueError, match=message):
            validate(lists, [program])

    lists = lowered_pair()
    lists[1].remove(parse_action("m:F2.0"))
    fails(lists, "rank 1 has m:F2.0 0 times")

    lists = lowered_pair()
    lists[0].append(parse_action("m:B2.0"))
    fails(lists, "rank 0 has m:B2.0 2 times")

    lists = lowered_pair()
    lists[1].append(parse_action("m:RB2.0"))  # the last rank receives no gradients
    fails(lists, "rank 1 has m:RB2.0, which is in none")

    lists = lowered_pair()
    swap(lists[1], "m:F1.0", "m:B1.0")
    fails(lists, "rank 1 has m:B1.0 before m:F1.0|rank 1 has m:F1.0 before m:RF1.0")

    lists = lowered_pair()
    swap(lists[0], "m:F1.0", "m:SF1.0")
    fails(lists, "rank 0 has m:SF1.0 before m:F1.0")

    lists = lowered_pair()
    swap(lists[1], "m:RF1.0", "m:RF0.0")
    fails(lists, "rank 1 has m:F0.0 before m:RF0.0")

    lists = lower(forward_only("m", 2, 3), [Program("m", 3, backward=False)], lookahead=2)
    swap(lists[1], "m:RF1.0", "m:RF0.0")
    with pytest.raises(ValueError, match=r"rank 1 has m:RF1.0 where rank 0 has m:SF0.0"):
        validate(lists, [Program(model="m", num_microbatches=3, backward=False)])


def test_validate_finds_a_deadlock() -> None:
    """Rank 0 wants the backward of microbatch 0 before it forwards 1, rank 1 the reverse."""
    text = "m:F0.0,m:B0.0,m:F1.0,m:B1.0\nm:F0.0,m:F1.0,m:B0.0,m:B1.0\n"
    lists = lower(from_csv(text), [Program("m", 2)])
    with pytest.raises(ValueError, match=r"deadlocks.* rank 0 at m:B0.0, rank 1 at m:F1.0"):
        validate(lists, [Program(model="m", num_microbatches=2)])


def test_validate_checks_hand_over_on_one_rank() -> None:
    lists = from_csv("m:F0.1,m:F0.0\n")
    program = Program(model="m", num_microbatches=1, num_chunks=2, backward=False)
    with pytest.raises(ValueError, match=r"rank 0 at m:F0.1"):
        validate(lists, [program])
