"""Ragged items between ranks, against what every rank can make for itself."""

import numpy as np

from puzzle_align.runtime.columns import exchange
from tests.dist.spawn import run_ranks

NUM_RANKS, NUM_ITEMS = 3, 11
TOKEN = 2**53 + 1


def _item(number: int, length: int) -> np.ndarray:
    return np.random.default_rng(number).standard_normal((length, 2))


def _exchanged(rank: int, world_size: int) -> None:
    generator = np.random.default_rng(7)
    sources = generator.integers(0, world_size, NUM_ITEMS)
    lengths = generator.integers(0, 5, NUM_ITEMS)
    held = {n: _item(n, int(lengths[n])) for n in np.flatnonzero(sources == rank).tolist()}
    wishes = [list(range(NUM_ITEMS)), [], [10, 3, 4]]
    for turn in range(world_size):  # every rank has each kind of wish once
        wanted = wishes[(rank + turn) % world_size]
        found = exchange(held, wanted, sources=sources, lengths=lengths, num_columns=2)
        assert set(found) == set(wanted)
        for number, values in found.items():
            np.testing.assert_array_equal(values, _item(number, int(lengths[number])))
        tokens = {n: np.full((int(lengths[n]), 1), TOKEN + n) for n in held}
        sent = exchange(
            tokens, wanted, sources=sources, lengths=lengths, num_columns=1, dtype=np.int64
        )
        for number, values in sent.items():  # whole numbers stay whole: float64 would lose the last
            assert values.dtype == np.int64
            assert values.tolist() == [[TOKEN + number]] * int(lengths[number])


def test_every_rank_gets_what_it_asks_for_and_nothing_else() -> None:
    run_ranks(_exchanged, NUM_RANKS, timeout=60)
