"""FlexAttention computed by FlashAttention 4's kernel (flash_attn.cute): CUDA, bf16."""

from typing import Any

from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from puzzle_align.models.attention.flash import why_no_import
from puzzle_align.models.attention.flex import attend_flex
from puzzle_align.models.attention.flex import prepare as prepare

_KERNEL: Any = {"BACKEND": "FLASH"}


def attend(q: Tensor, k: Tensor, v: Tensor, mask: BlockMask, scale: float | None = None) -> Tensor:
    """q [1, h, S, d], k and v [1, g, S, d] -> [1, h, S, d]."""
    return attend_flex(q, k, v, mask, scale, _KERNEL)


def why_missing() -> str | None:
    """Reason why the kernel's package does not work here; None if it does."""
    reason = why_no_import("flash_attn.cute.interface", "flash-attn-4")
    return None if reason is None else f"{reason}, or set it to flex"
