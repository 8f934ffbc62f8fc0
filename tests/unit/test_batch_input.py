"""A prefill batch's row: prompts one behind another, a shared one once."""

import numpy as np
import torch

from puzzle_align.runtime.generation.inputs import number_prompts, prefill_input
from puzzle_align.schedules.generation import GenerationBatch

CPU = torch.device("cpu")
A, B = np.array([7, 8, 9], dtype=np.int32), np.array([5, 6], dtype=np.int32)


def test_equal_neighbours_share_a_number() -> None:
    assert number_prompts([A, A.copy(), B, A, A[:2], A[:2]]) == [0, 0, 1, 2, 3, 3]


def test_a_shared_prompt_is_computed_once_for_all_its_slots() -> None:
    batch = GenerationBatch(0, 0, True, (3, 4, 5), 2, (0, 0, 0), ())
    row = prefill_input(batch, [A, A, B], 4, CPU)
    assert row.tokens.tolist() == [[7, 8, 9, 5, 6, 0, 0, 0]]
    assert row.position_ids[0, :5].tolist() == [0, 1, 2, 0, 1]
    assert row.predictions.predict_from.tolist() == [2, 2, 4]
    assert isinstance(row.cached.sources, torch.Tensor)
    assert row.cached.sources.tolist() == [0, 1, 2, 0, 1, 2, 3, 4]
    assert row.cached.slots.tolist() == [2, 2, 2, 3, 3, 3, 4, 4]
    assert row.cached.positions.tolist() == [0, 1, 2, 0, 1, 2, 0, 1]
    assert row.cache_length == 3
