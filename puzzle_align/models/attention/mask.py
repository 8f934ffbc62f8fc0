"""The rule that says which token sees which, as a dense mask too; and attention under a mask.

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

_ALIGNMENT = 8  # numbers: CUDA's kernels read masks in runs of so many


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


def attend_masked(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float | None) -> Tensor:
    """q [1, h, L, d], k and v [1, g, K, d] -> [1, h, L, d]; ``mask`` [L, K], bool or additive.

    On CUDA no kernel takes a mask and grouped queries together, and torch would make the scores of
    all pairs, repeating the keys for them besides: here the keys alone are repeated.
    """
    repeats = q.size(1) // k.size(1)
    if repeats > 1 and q.is_cuda:
        k, v = (x.repeat_interleave(repeats, dim=1) for x in (k, v))
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, scale=scale, enable_gqa=q.size(1) != k.size(1)
    )


def aligned(mask: Tensor) -> Tensor:
    """A copy of an additive mask [L, K] whose rows begin where CUDA's kernels can read them."""
    num_keys = mask.size(-1)
    return F.pad(mask, (0, -num_keys % _ALIGNMENT)).contiguous()[..., :num_keys]
