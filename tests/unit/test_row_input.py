"""Inputs of models and losses from a row: predicted tokens, or one number a response."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from puzzle_align.data.dataset import from_examples
from puzzle_align.data.loader import collate_row
from puzzle_align.layout.attention import BACKENDS, AttentionBackend
from puzzle_align.layout.model import Head
from puzzle_align.layout.rows import Microbatch
from puzzle_align.runtime.row_input import (
    PLAIN,
    OutputKind,
    Reading,
    RowInput,
    sum_responses,
    to_device,
)
from tests.unit.labelled import with_labels
from tests.unit.row_tensors import row_tensors

PAIRS = from_examples([([5, 6], [[7], [8, 9]]), ([1], [[2, 3], [4]])], 0)
PAIRS = with_labels(PAIRS, np.array([0.5, -1.0]))


CPU = torch.device("cpu")


def microbatch_of(*pairs: int, layout: str) -> Microbatch:
    """Row of 14 tokens with those pairs, in that order."""
    return collate_row(
        PAIRS, np.arange(2), np.array(pairs, dtype=np.int64), layout=layout, num_tokens=14
    )


def row_of(*pairs: int, layout: str, head: Head) -> RowInput:
    return to_device(
        microbatch_of(*pairs, layout=layout),
        "segments",
        CPU,
        Reading(output_kind="responses") if head == "scalar" else PLAIN,
    )


@pytest.mark.parametrize(("layout", "last"), [("shared", [2, 3, 6, 8]), ("paired", [2, 4, 7, 11])])
def test_a_scalar_head_reads_the_last_token_of_every_response(layout, last) -> None:
    row = row_of(1, 0, layout=layout, head="scalar")
    assert row.predictions.predict_from.tolist() == last
    assert row.tokens[0, last].tolist() == [3, 4, 7, 9]
    # Pair 1 comes first in the row, but pairs are in order of their numbers.
    assert row.examples.tolist() == [0, 1]
    rewards = sum_responses(row, torch.tensor([1.0, 2.0, 3.0, 4.0]))
    assert rewards.tolist() == [[3.0, 4.0], [1.0, 2.0]]
    assert row.labels.tolist() == [0.5, -1.0]
    assert row.lengths.tolist() == [[1, 2], [2, 1]]


@pytest.mark.parametrize("layout", ["shared", "paired"])
def test_a_language_model_predicts_every_token_of_the_same_responses(layout) -> None:
    row = row_of(1, 0, layout=layout, head="lm")
    assert row.predictions.targets is not None
    assert row.predictions.targets.tolist() == [2, 3, 4, 7, 8, 9]
    assert row.predictions.temperature == 1 and not row.predictions.entropies
    sums = sum_responses(row, torch.tensor([1.0, 10.0, 2.0, 3.0, 4.0, 40.0]))
    assert sums.tolist() == [[3.0, 44.0], [11.0, 2.0]]
    assert row.lengths.tolist() == [[1, 2], [2, 1]]
    assert row.responses.tolist() == [2, 3, 0, 1] and row.slot_lengths.tolist() == [2, 1, 1, 2]
    assert row_of(1, layout=layout, head="lm").responses.tolist() == [2, 3]  # of the batch


@pytest.mark.parametrize("head", ["lm", "scalar"])
def test_an_empty_row_has_nothing_to_predict(head: Head) -> None:
    row = row_of(layout="shared", head=head)
    assert row.predictions.predict_from.shape == (0,)
    assert sum_responses(row, torch.zeros(0)).shape == (0, 2)
    assert row.labels.shape == (0,)


def test_models_are_asked_different_things_of_one_row() -> None:
    """Pair 1 is ``1 | 2 3 | 4`` from 0, pair 0 ``5 6 | 7 | 8 9`` from 4."""
    microbatch = microbatch_of(1, 0, layout="shared")
    row = to_device(microbatch, "segments", CPU, Reading(temperature=0.5, entropies=True))
    asked = row.predictions
    assert asked.predict_from.tolist() == [0, 1, 0, 5, 5, 7]
    assert asked.temperature == 0.5 and asked.entropies
    expected: dict[OutputKind, list[int]] = {
        "responses": [2, 3, 6, 8],
        "states": [0, 1, 0, 5, 5, 7, 2, 3, 6, 8],
    }
    for kind, positions in expected.items():
        other = to_device(microbatch, "segments", CPU, Reading(output_kind=kind), like=row)
        assert other.predictions.predict_from.tolist() == positions
        assert other.predictions.targets is None
        assert other.tokens is row.tokens and other.attention is row.attention


@pytest.mark.parametrize("attention", BACKENDS)
def test_rows_of_other_pieces_differ_in_the_tensors_of_their_mask(
    attention: AttentionBackend,
) -> None:
    """So the test that compares a row on CUDA with the host's compares masks, of every backend."""
    masks = []
    for second in (2, 125):  # with 125 all padding is in the second block of 128
        pairs = from_examples([([5, 6], [[7], [8] * second])], 0)
        numbers = np.arange(1)
        microbatch = collate_row(pairs, numbers, numbers, layout="shared", num_tokens=256)
        tensors = row_tensors(to_device(microbatch, attention, CPU))
        masks.append({name: value for name, value in tensors.items() if name.startswith("mask")})
    one, other = masks
    assert one.keys() == other.keys()
    different = {name for name in one if not torch.equal(one[name], other[name])}
    assert different if attention != "flex" else different >= {"mask.mod", "mask.kv_num_blocks"}


def test_a_mask_of_an_unknown_kind_is_not_passed_over() -> None:
    row = row_of(0, layout="shared", head="lm")
    for structure in ([torch.ones(1)], Path()):
        odd = replace(row, attention=replace(row.attention, structure=structure))
        with pytest.raises(TypeError, match=f"^mask: {type(structure).__name__}"):
            row_tensors(odd)
