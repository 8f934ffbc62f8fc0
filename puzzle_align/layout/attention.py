"""Table of attention backends and their traits.

A backend is a row here and the file ``models/attention/NAME.py``, which computes it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal


@dataclass(frozen=True, kw_only=True)
class Backend:
    """Devices, precisions and costs of a backend."""

    trains_on_cpu: bool = True
    cuda_dtypes: tuple[str, ...] = ("fp32", "bf16")
    # Whether engine.attention=auto measures it on CUDA, in the order of the table. The results of
    # the others are compared with the first one's.
    is_candidate: bool = False
    # Whether an installed FlashAttention 3 or 4 can replace torch's in it, and whether
    # engine.flash_attention chooses which one.
    computes_through_flash: bool = False
    chooses_flash: bool = False
    skips_padding: bool = False  # costs next to nothing there
    computes_all_pairs: bool = False  # scores of all S x S pairs, masked ones too
    # Numbers per token that a layer keeps for the backward, beside its log-sum-exp. Arguments:
    # query heads, widths of queries and of keys on a tensor rank, tokens of the row.
    kept: Callable[[int, int, int, int], int] = lambda _heads, _queries, _keys, _tokens: 0


BACKENDS = {
    # Compiles its own kernels: an installed FlashAttention has no effect.
    "flex": Backend(trains_on_cpu=False, is_candidate=True),
    "segments": Backend(
        is_candidate=True,
        skips_padding=True,
        computes_through_flash=True,
        # Outputs before they are joined, and keys and values of further responses after those of
        # their prompts: of pairs that are half prompts, on CUDA, where every head has a copy.
        kept=lambda _heads, queries, _keys, _tokens: queries + 3 * queries // 2,
    ),
    "varlen": Backend(
        cuda_dtypes=("bf16",),
        is_candidate=True,
        computes_through_flash=True,
        chooses_flash=True,
        skips_padding=True,
        kept=lambda _heads, _queries, keys, _tokens: keys,  # prompts' keys and values once more
    ),
    # Experimental kernels come last.
    "flex_flash": Backend(trains_on_cpu=False, cuda_dtypes=("bf16",), is_candidate=True),
    "dense": Backend(
        computes_all_pairs=True,
        # The mask, which a layer converts; and on CUDA keys and values again for every head.
        kept=lambda _heads, queries, keys, tokens: tokens + 2 * (queries - keys),
    ),
}

if TYPE_CHECKING:
    AttentionBackend = str
else:
    AttentionBackend = Literal[tuple(BACKENDS)]  # readers of JSON check values against it
