"""What an iteration of a job has to do, from the lengths of its own data: for the planner."""

from collections.abc import Callable, Sequence
from functools import cache
from math import ceil
from statistics import fmean

from puzzle_align.data.loader import ExampleLoader, RowContents
from puzzle_align.planning.load import PassLoad, RowsOf
from puzzle_align.planning.measured import RowShape

NUM_SAMPLED_STEPS = 16

# (tokens of a row, batches that an iteration is cut into) -> a loader of such rows, and some of its
# steps.
LoaderOf = Callable[[int, int], tuple[ExampleLoader, Sequence[int]]]


def rows_of(loader_of: LoaderOf) -> RowsOf:
    """The passes of the steps that ``loader_of`` names, in the mean.

    Padded rows are taken as one data rank has them.
    """

    @cache
    def contents(row_tokens: int, batches: int) -> list[RowContents]:
        loader, steps = loader_of(row_tokens, batches)
        return [loader.row_contents(step) for step in steps]

    @cache
    def rows(row_tokens: int, batches: int, data: int, multiple: int) -> PassLoad:
        found = contents(row_tokens, batches)
        places = [max(1, ceil(c.num_rows / (data * multiple))) * multiple for c in found]
        there = sum(n * data for n in places)  # empty rows among them
        filled = sum(c.num_rows for c in found)
        empty_pairs = fmean(c.num_tokens * (c.num_tokens + 1) / 2 for c in found)
        pairs = sum(c.num_rows * c.pairs for c in found) + (there - filled) * empty_pairs
        shape = RowShape(
            row_tokens=round(fmean(c.num_tokens for c in found)),
            pairs=pairs / there,
            predictions=sum(c.num_rows * c.predictions for c in found) / there,
        )
        return PassLoad(microbatches=fmean(places), row=shape)

    return rows
