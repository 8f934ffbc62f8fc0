"""Packed rows: positions, masks and predictions from the places of prompts and responses.

Invariants (the tests assert them):
- segments do not overlap, are in order, and lie inside the row; the rest of the row is padding;
- a token attends to a token iff both are in one segment, the key is not after the query, and the
  key is in the prompt or in the query's response; each gap of padding is a segment;
- a response's positions restart at its prompt's length, so they are the same as in an unpacked
  sequence;
- the first token of every response is predicted from the prompt's last token; where there is no
  prompt, nothing predicts it.

Shapes: S tokens in a row, N predicted tokens, R responses (slots) in a row.
"""

from dataclasses import dataclass

import numpy as np

SLOT_MULTIPLE = 8  # padded sequences are this many tokens or a multiple of it


@dataclass(frozen=True, slots=True)
class Segment:
    """A prompt and its K >= 1 responses, contiguous in a row: ``prompt, y1, ..., yK``.

    A prompt may be empty, a response has at least one token.
    """

    start: int
    prompt_length: int
    response_lengths: tuple[int, ...]

    @property
    def prompt_end(self) -> int:
        """First position after the prompt."""
        return self.start + self.prompt_length

    @property
    def end(self) -> int:
        """First position after the last response."""
        return self.prompt_end + sum(self.response_lengths)

    def response_spans(self) -> list[tuple[int, int]]:
        """``(start, end)`` of every response."""
        spans, at = [], self.prompt_end
        for length in self.response_lengths:
            spans.append((at, at + length))
            at += length
        return spans


@dataclass(frozen=True, slots=True)
class RowLayout:
    """The segments of one row of ``num_tokens`` tokens."""

    num_tokens: int
    segments: tuple[Segment, ...]


@dataclass(frozen=True)
class Microbatch:
    """Input of one pipeline forward: a row, and the predictions of the last position.

    Response slot ``r`` is response ``branch_ids[r]`` (of a pair: 0 chosen, 1 rejected) of example
    ``example_ids[r]`` of the global batch. A pair has two slots in both layouts (shared: one
    segment with two responses; paired: two segments with one each).
    """

    layout: RowLayout
    tokens: np.ndarray  # int64 [S]
    position_ids: np.ndarray  # int64 [S]
    predict_from: np.ndarray  # int64 [N], positions whose hidden state predicts
    targets: np.ndarray  # int64 [N], the tokens to predict
    slots: np.ndarray  # int64 [N], response slot of every prediction
    example_ids: np.ndarray  # int64 [R]
    branch_ids: np.ndarray  # int64 [R]
    labels: np.ndarray  # float64 [R], see ``ExampleDataset``
    num_branches: int  # K, responses of every example; rankings may have fewer
    # Of rankings, int64 [P, 4]: number of the comparison in the global batch, example in the global
    # batch, its better response, its worse one. None: examples are no rankings.
    comparisons: np.ndarray | None


def position_ids(layout: RowLayout) -> np.ndarray:
    """Position of every token, int64 [S]; padding counts from zero in each gap."""
    positions = np.zeros(layout.num_tokens, dtype=np.int64)
    for start, end in padding_spans(layout):
        positions[start:end] = np.arange(end - start)
    for segment in layout.segments:
        positions[segment.start : segment.prompt_end] = np.arange(segment.prompt_length)
        for start, end in segment.response_spans():
            positions[start:end] = segment.prompt_length + np.arange(end - start)
    return positions


def padding_spans(layout: RowLayout) -> list[tuple[int, int]]:
    """``(start, end)`` of every maximal run of padding."""
    spans, at = [], 0
    for segment in layout.segments:
        if segment.start > at:
            spans.append((at, segment.start))
        at = segment.end
    if at < layout.num_tokens:
        spans.append((at, layout.num_tokens))
    return spans


def membership(layout: RowLayout) -> tuple[np.ndarray, np.ndarray]:
    """``(segment, part)`` of every token, int32 [S] each.

    ``part`` is 0 in a prompt (and in padding) and k in response k >= 1. Gaps of padding get
    segment numbers after the real ones. Token q attends to k iff ``segment`` is equal, ``k <= q``
    and ``part[k]`` is 0 or ``part[q]``.
    """
    segment_of = np.empty(layout.num_tokens, dtype=np.int32)
    part_of = np.zeros(layout.num_tokens, dtype=np.int32)
    for number, segment in enumerate(layout.segments):
        segment_of[segment.start : segment.end] = number
        for part, (start, end) in enumerate(segment.response_spans(), start=1):
            part_of[start:end] = part
    for number, (start, end) in enumerate(padding_spans(layout), start=len(layout.segments)):
        segment_of[start:end] = number
    return segment_of, part_of


def visible_pairs(layout: RowLayout) -> int:
    """Number of (query, key) pairs in which the query attends to the key, without padding."""
    num_pairs = 0
    for segment in layout.segments:
        prompt = segment.prompt_length
        num_pairs += prompt * (prompt + 1) // 2
        for length in segment.response_lengths:
            num_pairs += length * prompt + length * (length + 1) // 2
    return num_pairs


def predictions(layout: RowLayout) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """``(predict_from, target_positions, slots)`` of all predictions, int64 [N] each."""
    sources, targets, slots, slot = [], [], [], 0
    for segment in layout.segments:
        for start, end in segment.response_spans():
            target = np.arange(start, end)
            source = target - 1
            source[0] = segment.prompt_end - 1
            first = 0 if segment.prompt_length else 1
            sources.append(source[first:])
            targets.append(target[first:])
            slots.append(np.full(end - start - first, slot))
            slot += 1
    if not sources:
        none = np.zeros(0, dtype=np.int64)
        return none, none, none
    return np.concatenate(sources), np.concatenate(targets), np.concatenate(slots)


def last_tokens(layout: RowLayout) -> np.ndarray:
    """Position of every response's last token, int64 [R]: where a reward is read."""
    ends = [end for segment in layout.segments for _, end in segment.response_spans()]
    return np.array(ends, dtype=np.int64) - 1
