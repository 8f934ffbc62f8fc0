"""Pairs of one row into a microbatch: the two layouts, packed back to back or in padded slots."""

import numpy as np

from puzzle_align.data.dataset import PairDataset
from puzzle_align.layout.rows import Microbatch, RowLayout, Segment, position_ids, predictions

# (pair id, dataset row, branches): what one segment of a row holds.
SegmentContent = tuple[int, int, tuple[int, ...]]


def collate_row(
    dataset: PairDataset,
    members: np.ndarray,
    pair_ids: np.ndarray,
    *,
    layout: str,
    num_tokens: int,
    slot_width: int | None = None,
) -> Microbatch:
    """The microbatch of ``num_tokens`` tokens that holds the pairs ``members[pair_ids]``.

    ``members`` (int64 [B]) are the dataset rows of the global batch, ``pair_ids`` (int64) those of
    this row. Segments follow each other, or, with ``slot_width``, start every so many tokens.
    """
    contents = _segment_contents(dataset, members, pair_ids, layout)
    segments: list[Segment] = []
    tokens = np.full(num_tokens, dataset.pad_id, dtype=np.int64)
    start = 0
    for _, row, branches in contents:
        parts = [dataset.prompt(row), *(dataset.response(row, branch) for branch in branches)]
        lengths = [len(part) for part in parts]
        segments.append(Segment(start, lengths[0], tuple(lengths[1:])))
        end = start + sum(lengths)
        tokens[start:end] = np.concatenate(parts)
        start = end if slot_width is None else start + slot_width
    row_layout = RowLayout(num_tokens, tuple(segments))
    assert not segments or segments[-1].end <= num_tokens
    sources, targets, slots = predictions(row_layout)
    branch_counts = [len(branches) for _, _, branches in contents]
    slot_pairs = np.repeat(np.array([c[0] for c in contents], dtype=np.int64), branch_counts)
    return Microbatch(
        layout=row_layout,
        tokens=tokens,
        position_ids=position_ids(row_layout),
        predict_from=sources,
        targets=tokens[targets],
        slots=slots,
        pair_ids=slot_pairs,
        branch_ids=np.array([b for _, _, bs in contents for b in bs], dtype=np.int64),
        margins=dataset.pair_margins(members[slot_pairs]),
        num_branches=dataset.num_responses,
    )


def _segment_contents(
    dataset: PairDataset, members: np.ndarray, pair_ids: np.ndarray, layout: str
) -> list[SegmentContent]:
    """Shared: one segment a pair with all branches; paired: one segment a branch."""
    branches = tuple(range(dataset.num_responses))
    groups = (branches,) if layout == "shared" else tuple((branch,) for branch in branches)
    return [(pair, int(members[pair]), group) for pair in pair_ids.tolist() for group in groups]
