"""Attention mask of a row, as a function and as a dense tensor; attention with a mask.

Shapes: S tokens in a row; L queries, K keys, h query heads, g query groups (h a multiple of g), d
channels a head.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from puzzle_align.layout.rows import RowLayout, membership
from puzzle_align.models.host_copy import copied

MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]

_ALIGNMENT = 8  # elements; CUDA kernels need rows of a mask to begin at a multiple


def row_mask_mod(layout: RowLayout, device: torch.device) -> MaskMod:
    """Make FlexAttention's ``mask_mod(batch, head, query, key)`` for a row, on ``device``.

    Padding attends to the padding before it in the same gap, so every query has a key and every
    output is finite.
    """
    segment_of, part_of = (copied(ids, device) for ids in membership(layout))

    def mask_mod(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        same_segment = segment_of[query] == segment_of[key]
        same_branch = (part_of[key] == 0) | (part_of[key] == part_of[query])
        return (key <= query) & same_segment & same_branch

    return mask_mod


def dense_mask(layout: RowLayout, device: torch.device) -> Tensor:
    """Mask bool [S, S], True where the query (row) attends to the key (column)."""
    index = torch.arange(layout.num_tokens, device=device)
    zero = index.new_zeros(())
    return row_mask_mod(layout, device)(zero, zero, index[:, None], index[None, :])


def attend_masked(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float | None) -> Tensor:
    """q [1, h, L, d], k and v [1, g, K, d] -> [1, h, L, d]; ``mask`` [L, K], bool or additive.

    On CUDA no kernel takes a mask together with grouped queries: torch would fall back to scores of
    all pairs. So keys and values are repeated here for every head.
    """
    repeats = q.size(1) // k.size(1)
    if repeats > 1 and q.is_cuda:
        k, v = (x.repeat_interleave(repeats, dim=1) for x in (k, v))
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, scale=scale, enable_gqa=q.size(1) != k.size(1)
    )


def aligned(mask: Tensor) -> Tensor:
    """Copy an additive mask [L, K] so that its rows are aligned for CUDA kernels."""
    num_keys = mask.size(-1)
    return F.pad(mask, (0, -num_keys % _ALIGNMENT)).contiguous()[..., :num_keys]
