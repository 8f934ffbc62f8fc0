"""Attention under a mask, off torch's slow path where queries are grouped.

Shapes: L queries, K keys, h query heads, g query groups (h a multiple of g), d channels a head.
"""

import torch.nn.functional as F
from torch import Tensor

_ALIGNMENT = 8  # numbers: CUDA's kernels read masks in runs of so many


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
