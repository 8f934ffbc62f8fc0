"""The rule that says which token sees which, as a function of indices and as a dense mask.

Shapes: S tokens in a row.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from puzzle_align.layout.rows import RowLayout, membership
from puzzle_align.models.host_copy import copied

MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def row_mask_mod(layout: RowLayout, device: torch.device) -> MaskMod:
    """FlexAttention's ``mask_mod(batch, head, query, key)`` for this row, on ``device``.

    Padding sees the padding before it in its own gap, so no query is without a key and every
    output is finite.
    """
    segment_of, part_of = (copied(ids, device) for ids in membership(layout))

    def mask_mod(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        same_segment = segment_of[query] == segment_of[key]
        same_branch = (part_of[key] == 0) | (part_of[key] == part_of[query])
        return (key <= query) & same_segment & same_branch

    return mask_mod


def dense_mask(layout: RowLayout, device: torch.device) -> Tensor:
    """bool [S, S], True where the query (row) sees the key (column)."""
    index = torch.arange(layout.num_tokens, device=device)
    zero = index.new_zeros(())
    return row_mask_mod(layout, device)(zero, zero, index[:, None], index[None, :])
