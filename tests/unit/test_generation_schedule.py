"""Properties of the batches of a generating pipeline, whatever the lengths, limits and endings."""

from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st

from puzzle_align.schedules.generation import GenerationBatch, GenerationSchedule, Move

MAX_NEW_TOKENS = 12


@dataclass(frozen=True)
class Case:
    prompts: tuple[int, ...]  # tokens of every sequence's
    prompt_of: tuple[int, ...]  # its number
    answers: tuple[int, ...]  # tokens of every sequence's response
    num_groups: int
    group_size: int
    prompt_tokens: int
    num_steps: int = 1

    def schedule(self) -> GenerationSchedule:
        return GenerationSchedule(
            self.prompts,
            self.prompt_of,
            num_groups=self.num_groups,
            group_size=self.group_size,
            prompt_tokens=self.prompt_tokens,
            max_new_tokens=MAX_NEW_TOKENS,
            num_steps=self.num_steps,
        )


@st.composite
def cases(draw: st.DrawFn) -> Case:
    copies = draw(st.lists(st.tuples(st.integers(1, 12), st.integers(1, 3)), max_size=15))
    prompts = tuple(length for length, num in copies for _ in range(num))
    prompt_of = tuple(number for number, (_, num) in enumerate(copies) for _ in range(num))
    answers = st.lists(st.integers(1, MAX_NEW_TOKENS), min_size=len(prompts), max_size=len(prompts))
    sizes = (draw(st.integers(1, largest)) for largest in (5, 8, 30, 9))
    return Case(prompts, prompt_of, tuple(draw(answers)), *sizes)


def rounds(case: Case) -> list[list[GenerationBatch]]:
    """The batches that begin in every round; what the slots' caches would hold is asserted.

    A batch is under way for as many rounds as it has steps.
    """
    schedule, done = case.schedule(), []
    generated = [0] * len(case.prompts)
    slots: list[dict[int, list[int]]] = [{} for _ in range(case.num_groups)]  # sequence by token
    under_way: list[GenerationBatch | None] = [None] * case.num_groups
    steps_left = [0] * case.num_groups
    while True:
        batches = []
        for group in range(case.num_groups):
            steps_left[group] -= 1
            if steps_left[group] > 0:
                continue
            last = under_way[group]
            if last is not None:
                for sequence in last.sequences:
                    generated[sequence] += last.num_steps
                ended = [generated[s] >= case.answers[s] for s in last.sequences]
                schedule.learn(last, ended)
            batch = under_way[group] = schedule.next_batch(group)
            if batch is not None:
                steps_left[group] = batch.num_steps
                batches.append(batch)
                write(batch, slots[group], case)
        if not any(under_way):
            return done
        done.append(batches)


def write(batch: GenerationBatch, slots: dict[int, list[int]], case: Case) -> None:
    """Do to a model of the cache what the batch says; what it reads must be its sequence's."""
    slots_moved = {slot for move in batch.moves for slot in (move.source, move.destination)}
    assert len(slots_moved) == 2 * len(batch.moves)  # none is moved twice
    for move in batch.moves:
        assert len(slots[move.source]) == move.length
        slots[move.destination] = list(slots[move.source])
    for slot, (sequence, cached) in enumerate(
        zip(batch.sequences, batch.cached, strict=True), start=batch.first_slot
    ):
        if batch.is_prefill:
            slots[slot] = []
        assert slots[slot] == [sequence] * cached
        slots[slot] += [sequence] * (
            case.prompts[sequence] if batch.is_prefill else batch.num_steps
        )


@settings(max_examples=200)
@given(cases())
def test_every_sequence_is_served_and_limits_hold(case: Case) -> None:
    made = rounds(case)
    assert made == rounds(case)  # as every rank makes them
    batches = [batch for each in made for batch in each]
    assert [batch.number for batch in batches] == list(range(len(batches)))
    admitted = [s for batch in batches if batch.is_prefill for s in batch.sequences]
    assert admitted == list(range(len(case.prompts)))
    for sequence, answer in enumerate(case.answers):
        own = [batch for batch in batches if sequence in batch.sequences]
        made = sum(batch.num_steps for batch in own)
        # The last of them makes its last token, and what follows in its steps is dropped.
        assert made - own[-1].num_steps < answer <= made <= MAX_NEW_TOKENS
        assert len({batch.group for batch in own}) == 1
    for batch in batches:
        assert 1 <= batch.num_steps <= (1 if batch.is_prefill else case.num_steps)
        size = batch.first_slot + len(batch.sequences)
        assert size <= case.group_size
        computed = {case.prompt_of[s]: case.prompts[s] for s in batch.sequences}
        fits = sum(computed.values()) <= case.prompt_tokens
        assert not batch.is_prefill or fits or len(computed) == 1


@settings(max_examples=100)
@given(cases())
def test_no_group_idles_while_prompts_wait(case: Case) -> None:
    """Each round takes prompts until a group is full or the batch is; sequences are spread out."""
    number = len(case.prompts)
    first = [batch.group for batch in next(iter(rounds(case)), [])]
    assert first == list(range(min(number, case.num_groups)))
    waiting = number
    sizes = [0] * case.num_groups
    for batches in rounds(case):
        for batch in batches:
            before = sizes[batch.group]
            if batch.is_prefill:
                waiting -= len(batch.sequences)
                assert batch.first_slot <= before
                before = batch.first_slot + len(batch.sequences)
            else:
                capacity = case.schedule().capacities[batch.group]
                assert not waiting or len(batch.sequences) == capacity
                before = len(batch.sequences)
            sizes[batch.group] = before


def test_by_hand() -> None:
    """Three prompts on two slots: the second answer ends first, the third prompt takes over."""
    case = Case((4, 2, 5), (0, 1, 2), (4, 1, 2), num_groups=1, group_size=2, prompt_tokens=6)
    assert [batch for each in rounds(case) for batch in each] == [
        GenerationBatch(0, 0, True, (0, 1), 0, (0, 0), ()),
        GenerationBatch(1, 0, True, (2,), 1, (0,), ()),
        GenerationBatch(2, 0, False, (0, 2), 0, (4, 5), ()),
        GenerationBatch(3, 0, False, (0,), 0, (5,), ()),
        GenerationBatch(4, 0, False, (0,), 0, (6,), ()),
    ]


def test_the_last_sequence_moves_into_the_hole() -> None:
    case = Case((3, 3, 3), (0, 1, 2), (2, 3, 4), num_groups=1, group_size=3, prompt_tokens=9)
    batches = [batch for each in rounds(case) for batch in each]
    assert [batch.moves for batch in batches] == [(), (), (Move(2, 0, 4),), ()]
    assert [batch.sequences for batch in batches] == [(0, 1, 2), (0, 1, 2), (2, 1), (2,)]


def test_a_prompt_that_sequences_share_counts_once() -> None:
    case = Case((5, 5, 5, 4, 4), (0, 0, 0, 1, 1), (1,) * 5, 1, group_size=5, prompt_tokens=9)
    assert [batch.sequences for batches in rounds(case) for batch in batches] == [(0, 1, 2, 3, 4)]


def test_steps_end_with_the_first_sequence_that_is_full() -> None:
    """Three slots of twelve tokens at most: by 5 steps, what the prompts' own batch gave is one."""
    answers = (MAX_NEW_TOKENS, 3, MAX_NEW_TOKENS)
    case = Case((4, 2, 5), (0, 1, 2), answers, 1, group_size=2, prompt_tokens=6, num_steps=5)
    assert [batch for each in rounds(case) for batch in each] == [
        GenerationBatch(0, 0, True, (0, 1), 0, (0, 0), (), 1),
        GenerationBatch(1, 0, False, (0, 1), 0, (4, 2), (), 5),
        GenerationBatch(2, 0, True, (2,), 1, (0,), (), 1),
        GenerationBatch(3, 0, False, (0, 2), 0, (9, 5), (), 5),
        GenerationBatch(4, 0, False, (0, 2), 0, (14, 10), (), 1),
        GenerationBatch(5, 0, False, (2,), 0, (11,), (Move(1, 0, 11),), 5),
    ]
