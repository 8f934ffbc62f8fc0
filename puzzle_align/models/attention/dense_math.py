"""Attention with the row's dense mask by torch's unfused operations.

Scores of all S x S pairs of every head are in memory at once: a reference for other backends.
"""

import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from puzzle_align.models.attention.mask import dense_mask as prepare

__all__ = ["attend", "prepare"]


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float | None = None) -> Tensor:
    """q [1, h, S, d], k and v [1, g, S, d] -> [1, h, S, d]; ``mask`` bool [S, S]."""
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, scale=scale, enable_gqa=q.size(1) != k.size(1)
        )
