"""Attention over packed rows: one mask rule, three backends, one core attention for Megatron."""

from puzzle_align.models.attention.core_attention import (
    PackedCoreAttention,
    RowState,
    bind_row_state,
)
from puzzle_align.models.attention.plan import AttentionPlan, attend, prepare

__all__ = [
    "AttentionPlan",
    "PackedCoreAttention",
    "RowState",
    "attend",
    "bind_row_state",
    "prepare",
]
