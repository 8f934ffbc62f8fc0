"""Properties of the visits of a generating pipeline, whatever the lengths, limits and endings."""

from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st

from puzzle_align.schedules.generation import GenerationSchedule, Move, Visit


@dataclass(frozen=True)
class Case:
    prompts: tuple[int, ...]  # tokens of every sequence's
    prompt_of: tuple[int, ...]  # its number
    answers: tuple[int, ...]  # tokens of every sequence's response
    num_groups: int
    group_size: int
    prompt_tokens: int

    def schedule(self) -> GenerationSchedule:
        return GenerationSchedule(
            self.prompts,
            self.prompt_of,
            num_groups=self.num_groups,
            group_size=self.group_size,
            prompt_tokens=self.prompt_tokens,
        )


@st.composite
def cases(draw: st.DrawFn) -> Case:
    copies = draw(st.lists(st.tuples(st.integers(1, 12), st.integers(1, 3)), max_size=15))
    prompts = tuple(length for length, num in copies for _ in range(num))
    prompt_of = tuple(number for number, (_, num) in enumerate(copies) for _ in range(num))
    answers = st.lists(st.integers(1, 12), min_size=len(prompts), max_size=len(prompts))
    sizes = (draw(st.integers(1, largest)) for largest in (5, 8, 30))
    return Case(prompts, prompt_of, tuple(draw(answers)), *sizes)


def rounds(case: Case) -> list[list[Visit]]:
    """The visits of every round; in the caches of slots, what would be there is asserted."""
    schedule, done = case.schedule(), []
    generated = [0] * len(case.prompts)
    slots: list[dict[int, list[int]]] = [{} for _ in range(case.num_groups)]  # sequence by token
    under_way: list[Visit | None] = [None] * case.num_groups
    while True:
        visits = []
        for group in range(case.num_groups):
            last = under_way[group]
            if last is not None:
                for sequence in last.sequences:
                    generated[sequence] += 1
                ended = [generated[s] == case.answers[s] for s in last.sequences]
                schedule.learn(last, ended)
            visit = under_way[group] = schedule.next_visit(group)
            if visit is not None:
                visits.append(visit)
                write(visit, slots[group], case)
        if not visits:
            return done
        done.append(visits)


def write(visit: Visit, slots: dict[int, list[int]], case: Case) -> None:
    """Do to a model of the cache what the visit says; what it reads must be its sequence's."""
    for move in visit.moves:
        assert len(slots[move.source]) == move.length
        slots[move.destination] = list(slots[move.source])
    for slot, (sequence, cached) in enumerate(
        zip(visit.sequences, visit.cached, strict=True), start=visit.first_slot
    ):
        if visit.is_prompt:
            slots[slot] = []
        assert slots[slot] == [sequence] * cached
        slots[slot] += [sequence] * (case.prompts[sequence] if visit.is_prompt else 1)


@settings(max_examples=200, deadline=None)
@given(cases())
def test_every_sequence_is_served_and_limits_hold(case: Case) -> None:
    made = rounds(case)
    visits = [visit for visits in made for visit in visits]
    assert [visit.number for visit in visits] == list(range(len(visits)))
    admitted = [s for visit in visits if visit.is_prompt for s in visit.sequences]
    assert admitted == list(range(len(case.prompts)))
    for sequence, answer in enumerate(case.answers):
        assert sum(sequence in visit.sequences for visit in visits) == answer
        assert len({visit.group for visit in visits if sequence in visit.sequences}) == 1
    for visit in visits:
        size = visit.first_slot + len(visit.sequences)
        assert size <= case.group_size
        computed = {case.prompt_of[s]: case.prompts[s] for s in visit.sequences}
        fits = sum(computed.values()) <= case.prompt_tokens
        assert not visit.is_prompt or fits or len(computed) == 1


@settings(max_examples=100, deadline=None)
@given(cases())
def test_no_group_idles_while_prompts_wait(case: Case) -> None:
    """Each round takes prompts until a group is full or the visit is; sequences are spread out."""
    number = len(case.prompts)
    first = [visit.group for visit in next(iter(rounds(case)), [])]
    assert first == list(range(min(number, case.num_groups)))
    waiting = number
    sizes = [0] * case.num_groups
    for visits in rounds(case):
        for visit in visits:
            before = sizes[visit.group]
            if visit.is_prompt:
                waiting -= len(visit.sequences)
                assert visit.first_slot <= before
                before = visit.first_slot + len(visit.sequences)
            else:
                capacity = case.schedule().capacities[visit.group]
                assert not waiting or len(visit.sequences) == capacity
                before = len(visit.sequences)
            sizes[visit.group] = before


@settings(max_examples=50, deadline=None)
@given(cases())
def test_every_rank_makes_the_same_visits(case: Case) -> None:
    assert rounds(case) == rounds(case)


def test_by_hand() -> None:
    """Three prompts on two slots: the second answer ends first, the third prompt takes over."""
    case = Case((4, 2, 5), (0, 1, 2), (4, 1, 2), num_groups=1, group_size=2, prompt_tokens=6)
    assert [visit for visits in rounds(case) for visit in visits] == [
        Visit(0, 0, True, (0, 1), 0, (0, 0), ()),
        Visit(1, 0, True, (2,), 1, (0,), ()),
        Visit(2, 0, False, (0, 2), 0, (4, 5), ()),
        Visit(3, 0, False, (0,), 0, (5,), ()),
        Visit(4, 0, False, (0,), 0, (6,), ()),
    ]


def test_the_last_sequence_moves_into_the_hole() -> None:
    case = Case((3, 3, 3), (0, 1, 2), (2, 3, 4), num_groups=1, group_size=3, prompt_tokens=9)
    visits = [visit for visits in rounds(case) for visit in visits]
    assert [visit.moves for visit in visits] == [(), (), (Move(2, 0, 4),), ()]
    assert [visit.sequences for visit in visits] == [(0, 1, 2), (0, 1, 2), (2, 1), (2,)]


def test_a_prompt_that_sequences_share_counts_once() -> None:
    case = Case((5, 5, 5, 4, 4), (0, 0, 0, 1, 1), (1,) * 5, 1, group_size=5, prompt_tokens=9)
    assert [visit.sequences for visits in rounds(case) for visit in visits] == [(0, 1, 2, 3, 4)]
