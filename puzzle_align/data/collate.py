"""A row's examples into a microbatch: the two layouts, packed back to back or in padded slots."""

import numpy as np

from puzzle_align.data.dataset import ExampleDataset
from puzzle_align.layout.rows import Microbatch, RowLayout, Segment, position_ids, predictions

# (example id, index in the data set, branches): what one segment of a row holds.
SegmentContent = tuple[int, int, tuple[int, ...]]


def collate_row(
    dataset: ExampleDataset,
    members: np.ndarray,
    example_ids: np.ndarray,
    *,
    layout: str,
    num_tokens: int,
    slot_width: int | None = None,
) -> Microbatch:
    """The microbatch of ``num_tokens`` tokens that holds the examples ``members[example_ids]``.

    ``members`` (int64 [B]) are the global batch's indices in the data set, ``example_ids`` (int64)
    number those of this row. Segments follow each other, or, with ``slot_width``, start every so
    many tokens.
    """
    contents = _segment_contents(dataset, members, example_ids, layout)
    segments: list[Segment] = []
    tokens = np.full(num_tokens, dataset.pad_id, dtype=np.int64)
    start = 0
    for _, index, branches in contents:
        parts = [dataset.prompt(index), *(dataset.response(index, b) for b in branches)]
        lengths = [len(part) for part in parts]
        segments.append(Segment(start, lengths[0], tuple(lengths[1:])))
        end = start + sum(lengths)
        tokens[start:end] = np.concatenate(parts)
        start = end if slot_width is None else start + slot_width
    row_layout = RowLayout(num_tokens, tuple(segments))
    assert not segments or segments[-1].end <= num_tokens
    sources, targets, slots = predictions(row_layout)
    branch_counts = [len(branches) for _, _, branches in contents]
    slot_examples = np.repeat(np.array([c[0] for c in contents], dtype=np.int64), branch_counts)
    return Microbatch(
        layout=row_layout,
        tokens=tokens,
        position_ids=position_ids(row_layout),
        predict_from=sources,
        targets=tokens[targets],
        slots=slots,
        example_ids=slot_examples,
        branch_ids=np.array([b for _, _, bs in contents for b in bs], dtype=np.int64),
        labels=dataset.labels_of(members[slot_examples]),
        num_branches=dataset.num_responses,
    )


def _segment_contents(
    dataset: ExampleDataset, members: np.ndarray, example_ids: np.ndarray, layout: str
) -> list[SegmentContent]:
    """Shared: one segment an example with all branches; paired: one segment a branch."""
    branches = tuple(range(dataset.num_responses))
    groups = (branches,) if layout == "shared" else tuple((branch,) for branch in branches)
    return [(i, int(members[i]), group) for i in example_ids.tolist() for group in groups]
