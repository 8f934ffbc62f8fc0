"""The joint of data and models: what a row's segments imply for every token."""

import numpy as np
import pytest
from hypothesis import given

from puzzle_align.layout.rows import (
    RowLayout,
    Segment,
    last_tokens,
    membership,
    padding_spans,
    position_ids,
    predictions,
)
from tests.unit.row_strategies import layouts

TWO_PAIRS = RowLayout(12, (Segment(1, 2, (2, 1)), Segment(7, 1, (3,))))


def test_values_of_a_row_written_by_hand() -> None:
    segment_of, part_of = membership(TWO_PAIRS)
    assert padding_spans(TWO_PAIRS) == [(0, 1), (6, 7), (11, 12)]
    assert segment_of.tolist() == [2, 0, 0, 0, 0, 0, 3, 1, 1, 1, 1, 4]
    assert part_of.tolist() == [0, 0, 0, 1, 1, 2, 0, 0, 1, 1, 1, 0]
    assert segment_of.dtype == part_of.dtype == np.int32
    assert position_ids(TWO_PAIRS).tolist() == [0, 0, 1, 2, 3, 2, 0, 0, 1, 2, 3, 0]
    sources, targets, slots = predictions(TWO_PAIRS)
    assert sources.tolist() == [2, 3, 2, 7, 8, 9]
    assert targets.tolist() == [3, 4, 5, 8, 9, 10]
    assert slots.tolist() == [0, 0, 1, 2, 2, 2]
    assert last_tokens(TWO_PAIRS).tolist() == [4, 5, 10]


@pytest.mark.parametrize("num_tokens", [0, 5])
def test_a_row_without_segments_is_all_padding(num_tokens: int) -> None:
    layout = RowLayout(num_tokens, ())
    assert padding_spans(layout) == ([(0, 5)] if num_tokens else [])
    assert position_ids(layout).tolist() == list(range(num_tokens))
    assert [ids.size for ids in predictions(layout)] == [0, 0, 0]
    assert last_tokens(layout).size == 0


@given(layouts())
def test_every_token_is_in_one_segment_or_in_padding(layout: RowLayout) -> None:
    covered = np.zeros(layout.num_tokens, dtype=int)
    for start, end in padding_spans(layout):
        covered[start:end] += 1
    for segment in layout.segments:
        covered[segment.start : segment.end] += 1
    assert (covered == 1).all()
    ends = [end for segment in layout.segments for _, end in segment.response_spans()]
    assert last_tokens(layout).tolist() == [end - 1 for end in ends]


@given(layouts())
def test_a_response_has_positions_and_predictions_of_its_own_sequence(layout: RowLayout) -> None:
    positions = position_ids(layout)
    sources, targets, slots = predictions(layout)
    slot = 0
    for segment in layout.segments:
        prompt = np.arange(segment.start, segment.prompt_end)
        for start, end in segment.response_spans():
            alone = np.concatenate((prompt, np.arange(start, end)))
            assert positions[alone].tolist() == list(range(len(alone)))
            mine = slots == slot
            first = max(len(prompt), 1)  # nothing predicts a sequence's first token
            assert sources[mine].tolist() == alone[first - 1 : -1].tolist()
            assert targets[mine].tolist() == alone[first:].tolist()
            slot += 1
    assert slot == len(last_tokens(layout))


def test_a_row_without_prompts_written_by_hand() -> None:
    layout = RowLayout(7, (Segment(0, 0, (3, 2)), Segment(5, 0, (2,))))
    assert padding_spans(layout) == []
    assert membership(layout)[1].tolist() == [1, 1, 1, 2, 2, 1, 1]
    assert position_ids(layout).tolist() == [0, 1, 2, 0, 1, 0, 1]
    sources, targets, slots = predictions(layout)
    assert sources.tolist() == [0, 1, 3, 5]
    assert targets.tolist() == [1, 2, 4, 6]
    assert slots.tolist() == [0, 0, 1, 2]
    assert last_tokens(layout).tolist() == [2, 4, 6]
