"""A kernel that occupies blocks of a GPU for a time. Triton comes with torch for CUDA."""

import triton  # pyright: ignore[reportMissingImports]
from triton.language.extra.cuda import globaltimer  # pyright: ignore[reportMissingImports]

_WARPS = 16  # of a block: about as many as NCCL's


@triton.jit
def _spin(nanoseconds: int) -> None:
    start = globaltimer()
    now = start
    while now - start < nanoseconds:
        now = globaltimer()


def launch_spin(blocks: int, nanoseconds: int) -> None:
    """Spin on the current stream; returns at once."""
    _spin[(blocks,)](nanoseconds, num_warps=_WARPS)  # pyright: ignore[reportIndexIssue]
