"""A table's columns as a row or a mini-batch gets them; ``dist/test_collectives`` sends them."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from puzzle_align.runtime.columns import Table


def test_a_row_gets_its_examples_and_its_responses_tokens_in_its_order() -> None:
    table = Table(
        by_response={"ref_logps": torch.tensor([[1, 2], [3, 4], [5, 6]])},
        by_token={"values": {0: np.array([0.1, 0.2]), 1: np.zeros(0), 5: np.array([0.7])}},
    )
    row: Any = SimpleNamespace(
        examples=torch.tensor([2, 0]), responses=np.array([5, 1, 0]), tokens=torch.zeros(1, 9)
    )
    columns = table.of_row(row)
    assert columns["ref_logps"].tolist() == [[5, 6], [1, 2]]
    assert columns["values"].tolist() == [0.7, 0.1, 0.2]
    row.examples, row.responses = torch.tensor([], dtype=torch.int64), np.array([], dtype=np.int64)
    columns = table.of_row(row)
    assert columns["ref_logps"].shape == (0, 2)
    assert columns["values"].shape == (0,) and columns["values"].dtype == torch.float64


def test_a_mini_batch_numbers_its_responses_anew() -> None:
    """Examples 2, 0 and 1 have responses 4, 5, 0, 1, 2 and 3, of which 1 and 2 are elsewhere."""
    table = Table(by_token={"values": {r: np.array([10.0 * r]) for r in (0, 3, 4, 5, 7)}})
    batch = table.of_examples(np.array([2, 0, 1]), 2)
    found = {place: values.tolist() for place, values in batch.by_token["values"].items()}
    assert found == {0: [40.0], 1: [50.0], 2: [0.0], 5: [30.0]}
