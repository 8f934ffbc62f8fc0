"""What the planner takes a job's rows to hold, counted in the rows themselves."""

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from puzzle_align.data.loader import ExampleLoader
from puzzle_align.layout.rows import RowLayout, membership
from puzzle_align.stages.outlook import rows_of
from tests.unit.test_loader import make_dataset, make_loader


def pairs_of(layout: RowLayout) -> int:
    """(query, key) pairs of a row that see each other, by the rule of ``membership``."""
    segment, part = membership(layout)
    ahead = np.arange(len(segment))
    sees = (segment[:, None] == segment[None]) & (ahead[None] <= ahead[:, None])
    return int((sees & ((part[None] == 0) | (part[None] == part[:, None]))).sum())


@settings(max_examples=40)
@given(
    st.integers(1, 30),
    st.sampled_from(["shared", "paired"]),
    st.integers(1, 3),
    st.integers(32, 80),
    st.integers(0, 5),
)
def test_contents_are_those_of_the_packed_rows(
    num_examples: int, layout: str, num_responses: int, row_tokens: int, seed: int
) -> None:
    dataset = make_dataset(num_examples, num_responses, seed)
    loader = make_loader(dataset, layout=layout, row_tokens=max(row_tokens, 48))
    for step in range(loader.steps_per_epoch):
        found, rows = loader.row_contents(step), loader.batch(step).microbatches
        assert (found.num_rows, found.num_tokens) == (len(rows), rows[0].layout.num_tokens)
        pairs = np.mean([pairs_of(row.layout) for row in rows])
        # Responses of one prompt see each other's squares by half, like all else.
        assert found.pairs == pytest.approx(pairs)
        assert found.predictions == pytest.approx(np.mean([len(row.targets) for row in rows]))


@settings(max_examples=25)
@given(st.integers(8, 40), st.sampled_from([1, 2, 3, 4]), st.sampled_from([1, 2, 4]))
def test_a_replica_s_pass_is_the_mean_over_the_steps(
    num_examples: int, data: int, multiple: int
) -> None:
    dataset = make_dataset(num_examples)
    views = [
        make_loader(
            dataset, data_size=data, data_rank=rank, microbatch_multiple=multiple, shuffle=False
        )
        for rank in range(data)
    ]
    steps = range(views[0].steps_per_epoch)

    def loader_of(row_tokens: int, _batches: int) -> tuple[ExampleLoader, Sequence[int]]:
        return make_loader(dataset, row_tokens=row_tokens, shuffle=False), steps

    found = rows_of(loader_of)(64, 1, data, multiple)
    rows = [[view.batch(step).microbatches for view in views] for step in steps]
    every = [row for ranks in rows for own in ranks for row in own]
    assert found.microbatches == pytest.approx(np.mean([len(ranks[0]) for ranks in rows]))
    assert found.row.row_tokens == 64
    assert found.row.pairs == pytest.approx(np.mean([pairs_of(row.layout) for row in every]))
    assert found.row.predictions == pytest.approx(np.mean([len(row.targets) for row in every]))


def test_padded_rows_are_counted_about_right() -> None:
    dataset = make_dataset(24)
    for layout in ("shared", "paired"):
        loader = make_loader(dataset, layout=layout, packed=False)
        found, rows = loader.row_contents(0), loader.batch(0).microbatches
        assert (found.num_rows, found.num_tokens) == (len(rows), rows[0].layout.num_tokens)
        pairs = np.mean([pairs_of(row.layout) for row in rows])
        assert found.pairs == pytest.approx(pairs, rel=0.1)
