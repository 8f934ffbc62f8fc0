"""Attention with the row's dense mask: scores of all S x S pairs are computed."""

from puzzle_align.models.attention.mask import attend_masked as attend
from puzzle_align.models.attention.mask import dense_mask as prepare

__all__ = ["attend", "prepare"]
