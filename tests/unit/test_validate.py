"""The validator finds whatever is wrong with a schedule, and says where."""

from dataclasses import replace

import pytest

from puzzle_align.schedules.actions import Action, Program
from puzzle_align.schedules.lowering import lower
from puzzle_align.schedules.registry import one_f_one_b
from puzzle_align.schedules.validate import validate
from tests.costs import validated_peaks
from tests.unit.schedule_csv import from_csv, parse_action


def swap(actions: list[Action], first: str, second: str) -> None:
    i, j = actions.index(parse_action(first)), actions.index(parse_action(second))
    actions[i], actions[j] = actions[j], actions[i]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda one, two: two.remove(parse_action("m:F2.0")), "rank 1 has m:F2.0 0 times"),
        (lambda one, two: one.append(parse_action("m:B2.0")), "rank 0 has m:B2.0 2 times"),
        # the last rank receives no gradients
        (lambda one, two: two.append(parse_action("m:RB2.0")), "1 has m:RB2.0, which is in none"),
        (
            lambda one, two: swap(two, "m:F1.0", "m:B1.0"),
            "rank 1 has m:B1.0 before m:F1.0",
        ),
        (lambda one, two: swap(one, "m:F1.0", "m:SF1.0"), "rank 0 has m:SF1.0 before m:F1.0"),
        (lambda one, two: swap(two, "m:F0.0", "m:RF0.0"), "rank 1 has m:F0.0 before m:RF0.0"),
    ],
)
def test_validate_names_rank_and_action(change, message: str) -> None:
    lists = lower(one_f_one_b("m", 2, 3), [Program("m", 3)])
    change(*lists)
    with pytest.raises(ValueError, match=message):
        validate(lists, [Program("m", 3)])


def test_validate_names_ranks_whose_transfers_differ() -> None:
    lists = from_csv(
        "m:F0.0,m:SF0.0,m:F1.0,m:SF1.0,m:F2.0,m:SF2.0\n"
        "m:RF1.0,m:RF0.0,m:RF2.0,m:F0.0,m:F1.0,m:F2.0\n"
    )
    with pytest.raises(ValueError, match=r"rank 1 has m:RF1.0 where rank 0 has m:SF0.0"):
        validate(lists, [Program(model="m", num_microbatches=3, backward=False)])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        # Each posts its receive before it makes what the other's receive waits for.
        (
            "m:F0.0,m:SF0.0,m:RB0.0,m:F1.0,m:SF1.0,m:RB1.0,m:B0.0,m:B1.0\n"
            "m:RF0.0,m:F0.0,m:RF1.0,m:B0.0,m:SB0.0,m:F1.0,m:B1.0,m:SB1.0\n",
            "rank 0 at m:RB0.0, rank 1 at m:RF1.0",
        ),
        # A send that is matched only after a later computation of its own rank.
        (
            "m:F0.0,m:SF0.0,m:F1.0,m:SF1.0,m:RB0.0,m:B0.0,m:RB1.0,m:B1.0\n"
            "m:RF0.0,m:F0.0,m:B0.0,m:SB0.0,m:RF1.0,m:F1.0,m:B1.0,m:SB1.0\n",
            "rank 0 at m:SF1.0, rank 1 at m:SB0.0",
        ),
    ],
)
def test_validate_finds_a_transfer_that_waits_for_its_own_rank(text: str, message: str) -> None:
    """Both run where transfers are posted and forgotten; what waits for a device never ends."""
    lists, program = from_csv(text), Program("m", 2)
    with pytest.raises(ValueError, match=rf"deadlocks: these wait for ever: {message}"):
        validate(lists, [program])
    computed = [[action for action in own if action.kind.is_compute] for own in lists]
    validate(lower(computed, [program]), [program])


def test_validate_finds_a_deadlock() -> None:
    """Rank 0 wants the backward of microbatch 0 before it forwards 1, rank 1 the reverse."""
    text = "m:F0.0,m:B0.0,m:F1.0,m:B1.0\nm:F0.0,m:F1.0,m:B0.0,m:B1.0\n"
    lists = lower(from_csv(text), [Program("m", 2)])
    with pytest.raises(ValueError, match=r"deadlocks.* rank 0 at m:RB0.0, rank 1 at m:RF1.0"):
        validate(lists, [Program(model="m", num_microbatches=2)])


def test_validate_checks_hand_over_on_one_rank() -> None:
    lists = from_csv("m:F0.1,m:F0.0\n")
    program = Program(model="m", num_microbatches=1, num_chunks=2, backward=False)
    with pytest.raises(ValueError, match=r"rank 0 at m:F0.1"):
        validate(lists, [program])


def held_pair() -> tuple[Program, list[list[Action]]]:
    """Rank 1 holds microbatch 1 from before, and at the end 3, 4 and 5."""
    frozen = Program("m", 6, backward=False, windows=(range(2, 6), range(1, 3)))
    text = "m:F2.0,m:F3.0,m:F4.0,m:F5.0\nm:F1.0,m:F2.0\n"
    return frozen, lower(from_csv(text), [frozen])


def test_validate_finds_what_a_lookahead_model_does_wrong() -> None:
    def fails(windows: tuple[range, ...], lists: list[list[Action]], message: str) -> None:
        with pytest.raises(ValueError, match=message):
            validate(lists, [replace(frozen, windows=windows)])

    frozen, lists = held_pair()
    assert frozen.windows is not None
    first, second = frozen.windows
    fails((first, range(1, 7)), lists, r"rank 1 has the window 1\.\.6.*m:F6\.0")
    fails((first, range(3, 4)), lists, r"rank 1 has the window 3\.\.3.*m:F3\.0")
    fails((first, range(1, 4)), lists, r"rank 1 has m:F3\.0 0 times")
    fails((first, range(1, 2)), lists, r"rank 1 has m:F2\.0, which is in none")
    fails((range(1, 6), second), lists, r"rank 0 has m:F1\.0 0 times")

    lists[1].remove(parse_action("m:RF4.0"))
    fails(frozen.windows, lists, r"rank 1 has m:RF4\.0 0 times")

    _, lists = held_pair()
    lists[1].insert(0, parse_action("m:RF1.0"))  # an earlier list received it
    fails(frozen.windows, lists, r"rank 1 has m:RF1\.0, which is in none")

    _, lists = held_pair()
    swap(lists[1], "m:RF3.0", "m:RF5.0")
    fails(frozen.windows, lists, r"rank 1 has m:RF5\.0 where rank 0 has m:SF3\.0")

    _, lists = held_pair()
    swap(lists[1], "m:RF2.0", "m:F2.0")
    fails(frozen.windows, lists, r"rank 1 has m:F2\.0 before m:RF2\.0")


def test_validate_finds_an_input_that_comes_too_late() -> None:
    """Rank 0 wants m's backward before it forwards s's microbatch 1, rank 1 the reverse."""
    frozen = Program("s", 2, backward=False, windows=(range(2), range(2)))
    text = "s:F0.0,m:F0.0,m:B0.0,s:F1.0\ns:F0.0,s:F1.0,m:F0.0,m:B0.0\n"
    programs = [frozen, Program("m", 1)]
    lists = lower(from_csv(text), programs)
    with pytest.raises(ValueError, match=r"deadlocks.* rank 0 at m:SF0\.0, rank 1 at s:RF1\.0"):
        validate(lists, programs)
    # Had rank 1 held it from before, they would all go on.
    held = replace(frozen, windows=(range(2, 2), range(2)))
    programs = [held, Program("m", 1)]
    lists = lower(from_csv("m:F0.0,m:B0.0\ns:F0.0,s:F1.0,m:F0.0,m:B0.0\n"), programs)
    assert validated_peaks(lists, programs) == [1, 1]


def test_validate_keeps_a_reader_behind_the_model_that_it_reads() -> None:
    read, reader = Program("r", 2, backward=False), Program("a", 2, backward=False, reads="r")

    def check(last: str, read: Program) -> None:
        programs = [read, reader]
        first = ",".join([*(f"r:F{n}.0" for n in read.microbatches(0)), "a:F0.0", "a:F1.0"])
        validate(lower(from_csv(f"{first}\n{last}\n"), programs), programs)

    check("r:F0.0,a:F0.0,r:F1.0,a:F1.0", read)
    with pytest.raises(ValueError, match=r"rank 1 has a:F1\.0 without r:F1\.0 before it"):
        check("r:F0.0,a:F0.0,a:F1.0,r:F1.0", read)

    begun = replace(read, windows=(range(2, 2), range(1, 2)))  # the first ran in an earlier list
    check("a:F0.0,r:F1.0,a:F1.0", begun)
    with pytest.raises(ValueError, match=r"rank 1 has a:F1\.0 without r:F1\.0 before it"):
        check("a:F0.0,a:F1.0,r:F1.0", begun)
    with pytest.raises(ValueError, match=r"rank 1 has a:F1\.0 without r:F1\.0 before it"):
        check("r:F0.0,a:F0.0,a:F1.0", replace(read, windows=(range(2), range(1))))
