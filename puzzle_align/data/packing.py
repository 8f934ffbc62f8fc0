"""Pack examples into rows of a token budget, and distribute rows over data-parallel ranks.

Invariants (the tests assert them):
- ``first_fit_decreasing`` is exactly first-fit-decreasing: longest first (ties by index), each into
  the lowest-numbered row that has room; every example is in exactly one row, none over capacity;
- ``shortest_rows`` has no more rows than rows of the whole capacity take, rounded up as asked;
- ``balance`` gives every rank the same number of rows, each row to exactly one rank.

Nothing here is random: the loader shuffles.
"""

import heapq
from collections import defaultdict
from dataclasses import dataclass
from math import ceil

import numpy as np

# A query-key pair of attention costs 4H FLOPs a layer, a token's matrices about 24H^2: at the
# common H = 4096, this many query-key pairs cost as much as one token.
ATTENTION_PAIRS_PER_TOKEN = 6 * 4096
NUM_SIZES = 16  # sizes of packed rows in a run, at most: compiled attention compiles each
SIZE_MULTIPLE = 128  # divides a rank's part of them: a block of attention, and of FP8's scales


@dataclass(frozen=True)
class Rows:
    """Examples of every row: row ``r`` holds ``examples[offsets[r]:offsets[r + 1]]``, in order."""

    examples: np.ndarray  # int64 [num_examples]
    offsets: np.ndarray  # int64 [num_rows + 1]

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, row: int) -> np.ndarray:
        """Examples of one row, int64."""
        return self.examples[self.offsets[row] : self.offsets[row + 1]]

    def take(self, rows: np.ndarray) -> "Rows":
        """These rows, in this order."""
        taken = [self[row] for row in rows.tolist()]
        offsets = np.cumsum([0, *map(len, taken)])
        return Rows(np.concatenate([self.examples[:0], *taken]), offsets)


def example_lengths(
    prompt_lengths: np.ndarray, response_lengths: np.ndarray, layout: str
) -> np.ndarray:
    """Tokens of each example in a packed row, int64 [n], from lengths [n] and [n, K].

    Layout ``shared`` holds the prompt once, ``paired`` once per response.
    """
    copies = prompt_copies(response_lengths, layout)
    return copies * prompt_lengths.astype(np.int64) + response_lengths.sum(axis=1, dtype=np.int64)


def prompt_copies(response_lengths: np.ndarray, layout: str) -> np.ndarray | int:
    """How often a row holds each example's prompt, from responses' lengths [n, K]."""
    return 1 if layout == "shared" else (response_lengths > 0).sum(axis=1)


def slot_lengths(
    prompt_lengths: np.ndarray, response_lengths: np.ndarray, layout: str, multiple: int
) -> np.ndarray:
    """Tokens of each example's longest sequence, rounded up to ``multiple``, int64 [n].

    Padded rows give every sequence a slot of the largest such length in the batch.
    """
    longest = (response_lengths.sum if layout == "shared" else response_lengths.max)(axis=1)
    lengths = prompt_lengths.astype(np.int64) + longest.astype(np.int64)
    return -(-lengths // multiple) * multiple


def first_fit_decreasing(lengths: np.ndarray, capacity: int) -> Rows:
    """Pack ``lengths`` (int [n], each in 1..capacity) into rows of ``capacity`` tokens.

    Equal lengths are placed together. ``open_rows`` is a heap of the rows with room for the current
    length, so its top is the first fit; a row without room for it waits in ``waiting[room]`` until
    the lengths have shrunk to its room. O(n log rows).
    """
    lengths = np.asarray(lengths, dtype=np.int64)
    if len(lengths) == 0:
        return Rows(np.zeros(0, dtype=np.int64), np.zeros(1, dtype=np.int64))
    assert lengths.min() >= 1 and lengths.max() <= capacity
    capacity = min(capacity, int(lengths.sum()))  # which one row holds: the table is as long
    order = np.argsort(-lengths, kind="stable")
    counts = np.bincount(lengths, minlength=capacity + 1)
    sizes = np.flatnonzero(counts)[::-1].tolist()
    room: list[int] = []
    waiting: defaultdict[int, list[int]] = defaultdict(list)
    open_rows: list[int] = []
    placed_row: list[int] = []
    placed_count: list[int] = []
    largest_open = capacity + 1
    for size in sizes:
        for free in range(size, largest_open):
            for row in waiting.get(free, ()):
                heapq.heappush(open_rows, row)
        largest_open = size
        left = int(counts[size])
        while left:
            if not open_rows:
                open_rows.append(len(room))
                room.append(capacity)
            row = open_rows[0]
            fit = min(left, room[row] // size)
            left -= fit
            room[row] -= fit * size
            placed_row.append(row)
            placed_count.append(fit)
            if room[row] < size:
                heapq.heappop(open_rows)
                waiting[room[row]].append(row)
    row_of = np.repeat(placed_row, placed_count)
    offsets = np.zeros(len(room) + 1, dtype=np.int64)
    np.cumsum(np.bincount(row_of, minlength=len(room)), out=offsets[1:])
    return Rows(order[np.argsort(row_of, kind="stable")], offsets)


def shortest_rows(
    lengths: np.ndarray, capacity: int, *, num_rows_multiple: int = 1, num_parts: int = 1
) -> tuple[Rows, int]:
    """Pack as ``first_fit_decreasing`` does, into rows as short as their number allows.

    Rows of ``capacity`` leave the last one partly empty, and others where ranks need a multiple;
    tokens of padding cost as much as others.

    Args:
        lengths: int [n], each in 1..capacity.
        num_rows_multiple: the number of rows is rounded up to a multiple, by empty ones.
        num_parts: into which shorter rows can be cut, each a multiple of ``SIZE_MULTIPLE``.

    Returns:
        The rows, and the tokens of each: the capacity, or one of ``NUM_SIZES`` sizes below it.
    """
    rows = first_fit_decreasing(lengths, capacity)
    num_rows = ceil(len(rows) / num_rows_multiple) * num_rows_multiple
    multiple = SIZE_MULTIPLE * num_parts
    step = ceil(capacity / NUM_SIZES / multiple) * multiple
    least = max(int(lengths.max()), ceil(int(lengths.sum()) / num_rows))
    for size in range(ceil(least / step) * step, capacity, step):
        shorter = first_fit_decreasing(lengths, size)
        if len(shorter) <= num_rows:
            return shorter, size
    return rows, capacity


def equal_rows(num_examples: int, examples_per_row: int) -> Rows:
    """Put consecutive examples into rows of equally many (the last may hold fewer)."""
    bounds = [*range(0, num_examples, examples_per_row), num_examples]
    return Rows(np.arange(num_examples, dtype=np.int64), np.array(bounds, dtype=np.int64))


def row_pairs(
    rows: Rows, prompt_lengths: np.ndarray, response_lengths: np.ndarray, layout: str
) -> np.ndarray:
    """Unmasked (query, key) pairs of each row, without padding, float64 [num_rows].

    A shared segment has about P^2/2 + sum(P*y + y^2/2); ``paired`` counts P^2/2 once per response.
    ``rows`` index the lengths.
    """
    prompts = prompt_lengths.astype(np.float64)
    responses = response_lengths.astype(np.float64)
    copies = prompt_copies(response_lengths, layout)
    pairs = copies * prompts**2 / 2 + prompts * responses.sum(1) + (responses**2).sum(1) / 2
    return _by_row(rows, pairs)


def row_costs(
    rows: Rows, prompt_lengths: np.ndarray, response_lengths: np.ndarray, layout: str
) -> np.ndarray:
    """Relative cost of each row, float64 [num_rows]: tokens plus weighted ``row_pairs``."""
    tokens = _by_row(rows, example_lengths(prompt_lengths, response_lengths, layout))
    pairs = row_pairs(rows, prompt_lengths, response_lengths, layout)
    return tokens + pairs / ATTENTION_PAIRS_PER_TOKEN


def _by_row(rows: Rows, values: np.ndarray) -> np.ndarray:
    """Sum ``values`` [num_examples] over each row's examples, float64 [num_rows]."""
    return np.add.reduceat(values[rows.examples].astype(np.float64), rows.offsets[:-1])


def balance(costs: np.ndarray, num_ranks: int, multiple: int) -> list[list[int | None]]:
    """Distribute rows over ranks: equally many, a multiple of ``multiple``, of nearly equal cost.

    Rows are assigned by decreasing cost to the least loaded rank with a free place (ties: the lower
    rank), and stay in this order, so that microbatch i costs about the same on all ranks. None
    stands for an empty row.
    """
    places = ceil(len(costs) / (num_ranks * multiple)) * multiple
    ranks: list[list[int | None]] = [[] for _ in range(num_ranks)]
    loads = [(0.0, rank) for rank in range(num_ranks)]
    for row in np.argsort(-np.asarray(costs), kind="stable").tolist():
        load, rank = heapq.heappop(loads)
        ranks[rank].append(row)
        if len(ranks[rank]) < places:
            heapq.heappush(loads, (load + float(costs[row]), rank))
    return [rows + [None] * (places - len(rows)) for rows in ranks]
