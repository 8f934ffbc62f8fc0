"""First-fit-decreasing, row costs and balance."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from puzzle_align.data.packing import (
    ATTENTION_PAIRS_PER_TOKEN,
    NUM_SIZES,
    SIZE_MULTIPLE,
    Rows,
    balance,
    equal_rows,
    example_lengths,
    first_fit_decreasing,
    row_costs,
    shortest_rows,
    slot_lengths,
)


def naive_first_fit_decreasing(lengths: list[int], capacity: int) -> list[list[int]]:
    """The textbook algorithm, O(n * rows)."""
    rows: list[list[int]] = []
    room: list[int] = []
    for item in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        fits = [row for row, free in enumerate(room) if free >= lengths[item]]
        row = fits[0] if fits else len(rows)
        if not fits:
            rows.append([])
            room.append(capacity)
        rows[row].append(item)
        room[row] -= lengths[item]
    return rows


@st.composite
def lengths_and_capacity(draw):
    capacity = draw(st.integers(1, 60))
    return draw(st.lists(st.integers(1, capacity), max_size=80)), capacity


@given(lengths_and_capacity())
@settings(max_examples=300)
def test_equals_naive_first_fit_decreasing(case):
    lengths, capacity = case
    rows = first_fit_decreasing(np.array(lengths, dtype=np.int64), capacity)
    assert [rows[i].tolist() for i in range(len(rows))] == naive_first_fit_decreasing(
        lengths, capacity
    )


def test_a_row_may_be_as_long_as_a_config_allows():
    rows = first_fit_decreasing(np.array([3, 5, 4]), 2**31 - 1)
    assert [rows[i].tolist() for i in range(len(rows))] == [[1, 2, 0]]


def test_known_bins():
    # 7 | 5+5 | 4+3+3: 4 does not fit next to 7 in 10, 3 does, the other 3 goes next to 4.
    rows = first_fit_decreasing(np.array([3, 5, 7, 4, 5, 3]), 10)
    assert [rows[i].tolist() for i in range(len(rows))] == [[2, 0], [1, 4], [3, 5]]


@given(
    st.lists(st.integers(1, 2100), min_size=1, max_size=60),
    st.integers(2100, 5000),
    st.integers(1, 6),
    st.sampled_from([1, 2, 3, 8]),
)
@settings(max_examples=200)
def test_rows_are_the_shortest_that_take_no_more_places(
    lengths: list[int], capacity: int, num_rows_multiple: int, num_parts: int
) -> None:
    found, size = shortest_rows(
        np.array(lengths),
        capacity,
        num_rows_multiple=num_rows_multiple,
        num_parts=num_parts,
    )
    places = len(naive_first_fit_decreasing(lengths, capacity))
    places += -places % num_rows_multiple
    rows = [found[row].tolist() for row in range(len(found))]
    assert rows == naive_first_fit_decreasing(lengths, size)
    assert len(rows) <= places
    unit = SIZE_MULTIPLE * num_parts
    step = -(-capacity // (NUM_SIZES * unit)) * unit
    assert size == capacity or (size % step == 0 and size < capacity)
    for shorter in range(step, size, step):
        too_short = shorter < max(lengths)
        assert too_short or len(naive_first_fit_decreasing(lengths, shorter)) > places


def test_shortest_rows_by_hand() -> None:
    """Nine of 500 fill two rows of 2,048 and a part of a third: 1,536 tokens each are enough."""
    lengths = np.full(9, 500)
    rows, size = shortest_rows(lengths, 2048)
    assert (len(rows), size) == (3, 1536)
    # Two ranks take four rows, an empty one among them: of three examples at most.
    rows, size = shortest_rows(lengths, 2048, num_rows_multiple=2)
    assert (len(rows), size) == (3, 1536)
    rows, size = shortest_rows(lengths[:8], 2048, num_rows_multiple=4)
    assert (len(rows), size) == (4, 1024)
    rows, size = shortest_rows(np.array([2047]), 2048)
    assert (len(rows), size) == (1, 2048)


@pytest.mark.parametrize("kind", ["lognormal", "uniform"])
def test_a_million_pairs(kind):
    generator = np.random.default_rng(0)
    if kind == "uniform":  # as many rows as it gets
        lengths = generator.integers(1, 4097, 1_000_000)
    else:
        lengths = np.clip(generator.lognormal(6, 0.8, 1_000_000).astype(np.int64), 1, 4096)
    rows = first_fit_decreasing(lengths, 4096)
    assert np.array_equal(np.sort(rows.examples), np.arange(1_000_000))
    used = np.add.reduceat(lengths[rows.examples], rows.offsets[:-1])
    assert used.max() <= 4096
    assert used.mean() / 4096 > 0.99


def test_pair_and_slot_lengths():
    prompts = np.array([4, 10], dtype=np.int32)
    responses = np.array([[1, 2, 3], [5, 5, 7]], dtype=np.int32)
    assert example_lengths(prompts, responses, "shared").tolist() == [10, 27]
    assert example_lengths(prompts, responses, "paired").tolist() == [18, 47]
    assert slot_lengths(prompts, responses, "shared", 8).tolist() == [16, 32]
    assert slot_lengths(prompts, responses, "paired", 8).tolist() == [8, 24]


def test_row_costs_by_hand():
    prompts = np.array([4, 2, 2], dtype=np.int32)
    responses = np.array([[2, 6], [1, 1], [1, 1]], dtype=np.int32)
    rows = Rows(np.array([1, 2, 0]), np.array([0, 2, 3]))
    # pair 0: 16/2 + 4*8 + (4 + 36)/2 = 60 query-key pairs; pairs 1 and 2: 4/2 + 2*2 + 2/2 = 7.
    expected = [8 + 14 / ATTENTION_PAIRS_PER_TOKEN, 12 + 60 / ATTENTION_PAIRS_PER_TOKEN]
    np.testing.assert_allclose(row_costs(rows, prompts, responses, "shared"), expected, rtol=1e-14)
    # paired: the causal squares (4+2)^2/2 + (4+6)^2/2 = 68 and 3^2/2 * 2 = 9.
    expected = [12 + 18 / ATTENTION_PAIRS_PER_TOKEN, 16 + 68 / ATTENTION_PAIRS_PER_TOKEN]
    np.testing.assert_allclose(row_costs(rows, prompts, responses, "paired"), expected, rtol=1e-14)


@given(st.lists(st.floats(0.1, 100), max_size=40), st.integers(1, 6), st.integers(1, 4))
@settings(max_examples=200)
def test_balance_gives_every_rank_the_same_count(costs, num_ranks, multiple):
    ranks = balance(np.array(costs), num_ranks, multiple)
    counts = {len(rows) for rows in ranks}
    assert len(counts) == 1 and counts.pop() % multiple == 0
    real = [row for rows in ranks for row in rows if row is not None]
    assert sorted(real) == list(range(len(costs)))
    shortest = -(-len(costs) // num_ranks)
    assert len(ranks[0]) < shortest + multiple
    for rows in ranks:
        values = [costs[row] for row in rows if row is not None]
        assert values == sorted(values, reverse=True)


def test_balance_evens_costs_out():
    # 8, 7, 6, 5, 4, 3 on two ranks with three places each.
    ranks = balance(np.array([3.0, 8, 5, 7, 4, 6]), 2, 1)
    assert ranks == [[1, 2, 4], [3, 5, 0]]
    # Equal costs stay in order, so that machines with other sorts agree.
    ranks = balance(np.array([1.0, 2] * 32), 2, 1)
    assert ranks == [[*range(own, 64, 4), *range(own - 1, 64, 4)] for own in (1, 3)]


def test_equal_rows():
    rows = equal_rows(7, 3)
    assert [rows[i].tolist() for i in range(len(rows))] == [[0, 1, 2], [3, 4, 5], [6]]
