"""FlexAttention computed by FlashAttention 4's kernel (flash_attn.cute): CUDA, bf16."""

from functools import partial

from puzzle_align.models.attention import flex
from puzzle_align.models.attention.flash import why_no_import

prepare = flex.prepare
attend = partial(flex.attend, kernel_options={"BACKEND": "FLASH"})


def why_missing() -> str | None:
    """Reason why the kernel's package does not work here; None if it does."""
    reason = why_no_import("flash_attn.cute.interface", "flash-attn-4")
    return None if reason is None else f"{reason}, or set it to flex"
