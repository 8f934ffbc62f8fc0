"""Attention under the row's dense mask: all S x S pairs are computed, hidden ones too."""

from puzzle_align.models.attention.mask import attend_masked as attend
from puzzle_align.models.attention.mask import dense_mask as prepare

__all__ = ["attend", "prepare"]
