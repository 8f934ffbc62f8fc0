"""FlexAttention computed by FlashAttention 4's kernel (flash_attn.cute): CUDA, bf16."""

from typing import Any

from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from puzzle_align.models.attention.flex import attend_flex
from puzzle_align.models.attention.flex import prepare as prepare

_KERNEL: Any = {"BACKEND": "FLASH"}


def attend(q: Tensor, k: Tensor, v: Tensor, mask: BlockMask, scale: float | None = None) -> Tensor:
    """q [1, h, S, d], k and v [1, g, S, d] -> [1, h, S, d]."""
    return attend_flex(q, k, v, mask, scale, _KERNEL)


def why_missing() -> str | None:
    """Reason why the kernel's package does not work here; None if it does."""
    try:
        import flash_attn.cute.interface  # type: ignore[import-not-found] # noqa: F401
    except Exception as error:  # noqa: BLE001 a broken package raises what it likes
        reason = " ".join(str(error).split())
        return (
            f"flash_attn.cute does not import ({reason}); install flash-attn-4, or set it to flex"
        )
    return None
