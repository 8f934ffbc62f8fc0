"""Attention over packed rows: one mask rule, a registry of backends, Megatron's core attention."""

from puzzle_align.models.attention.cache import (
    CachedTokens,
    CacheRow,
    DecodeRow,
    KeyValueCache,
    PromptRow,
    decode_length,
    decode_mask,
)
from puzzle_align.models.attention.core_attention import (
    PackedCoreAttention,
    RowState,
    bind_row_state,
)
from puzzle_align.models.attention.flash import use_flash_attention
from puzzle_align.models.attention.registry import (
    AttentionPlan,
    attend,
    prepare_attention,
    why_unavailable,
)

__all__ = [
    "AttentionPlan",
    "CacheRow",
    "CachedTokens",
    "DecodeRow",
    "KeyValueCache",
    "PackedCoreAttention",
    "PromptRow",
    "RowState",
    "attend",
    "bind_row_state",
    "decode_length",
    "decode_mask",
    "prepare_attention",
    "use_flash_attention",
    "why_unavailable",
]
