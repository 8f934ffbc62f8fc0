"""A step's rows are the same whether they were prepared or not, whenever they are asked for."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from puzzle_align.data.dataset import from_examples
from puzzle_align.data.loader import ExampleLoader
from puzzle_align.layout.plan import ParallelPlan
from puzzle_align.runtime.batches import DataBatches
from puzzle_align.runtime.row_input import PLAIN, Reading, RowInput, to_device
from tests.unit.row_tensors import row_tensors
from tests.unit.test_loader import make_loader

CPU = torch.device("cpu")


def loader_of(**changes: object) -> ExampleLoader:
    """Steps of 2 to 4 rows, whose numbers differ."""
    generator = np.random.default_rng(0)

    def text() -> list[int]:
        return generator.integers(1, 90, generator.integers(1, 14)).tolist()

    pairs = from_examples([(text(), [text(), text()]) for _ in range(23)], pad_id=0)
    return make_loader(pairs, global_batch_size=4, row_tokens=48, seed=0, **changes)


def same(a: RowInput, b: RowInput) -> bool:
    one, other = row_tensors(a), row_tensors(b)
    assert {"targets", "mask"} <= one.keys() == other.keys()
    return all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("prepared", [(), (1,), (0, 1, 2), (5, 6, 7), (7, 6, 2)])
def test_prepared_rows_are_those_of_the_loader(prepared: tuple[int, ...]) -> None:
    """Steps 5 and 6 are of two epochs."""
    steps, loader = DataBatches(loader_of(), "dense", CPU), loader_of()
    steps.rows(4)  # before rows are read, none are prepared
    for step in prepared:
        steps.prepare(step)
    for step in range(9):
        expected = [to_device(m, "dense", CPU) for m in loader.batch(step).microbatches]
        found = steps.rows(step)
        steps.prepare(step + 1)
        assert all(same(a, b) for a, b in zip(found, expected, strict=True))
        assert steps.rows(step) is found
        assert loader.num_microbatches(step) == len(found)
    assert len({loader.num_microbatches(step) for step in range(9)}) > 1


@pytest.mark.parametrize("read", [DataBatches.batch, DataBatches.rows])
def test_what_nobody_reads_is_not_prepared(
    read: Callable[[DataBatches, int], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A batch of all replicas' rows, of which each model sees a part."""
    steps, prepared = DataBatches(loader_of(), "dense", CPU), []
    prepare = steps._prepared.prepare
    recorded = lambda step: prepared.append(step) or prepare(step)  # noqa: E731
    monkeypatch.setattr(steps._prepared, "prepare", recorded)
    replica: Any = SimpleNamespace(plan=ParallelPlan(data=2), data_rank=1)
    assert steps.seen_by(replica) is steps.seen_by(replica) is not steps
    steps.prepare(0)
    assert prepared == []
    read(steps, 0)
    steps.prepare(1)
    assert prepared == [0, 1]
    whole: Any = SimpleNamespace(plan=ParallelPlan(), data_rank=0)
    assert steps.seen_by(whole) is steps


def test_all_readings_so_far_are_prepared_and_share_tokens() -> None:
    steps, other = DataBatches(loader_of(), "dense", CPU), Reading(output_kind="responses")
    for step in range(2):
        rows = [steps.rows(step, reading) for reading in (PLAIN, other)]
        assert all(one.tokens is two.tokens for one, two in zip(*rows, strict=True))
        _, prepared = steps._prepared.of(step + 1)
        assert prepared.keys() == {PLAIN, other}
    assert steps._readings == [PLAIN, other]  # each is made once


@pytest.mark.parametrize("scope", ["batch", "dataset"])
@pytest.mark.parametrize("sizes", [(1, 1), (3, 1), (2, 4)])
def test_every_rank_counts_its_microbatches(scope: str, sizes: tuple[int, int]) -> None:
    view = dict(zip(("data_size", "microbatch_multiple"), sizes, strict=True))
    for data_rank in range(sizes[0]):
        loader = loader_of(scope=scope, data_rank=data_rank, **view)
        for step in range(8):
            assert loader.num_microbatches(step) == len(loader.batch(step).microbatches)
