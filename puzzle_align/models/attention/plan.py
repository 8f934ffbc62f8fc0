"""What a backend needs to attend within one row, made once a microbatch; and attention by it.

Shapes: S tokens in a row, h query heads, g query groups (h a multiple of g), d channels a head.
"""

from dataclasses import dataclass
from typing import get_args

import torch
from torch import Tensor

from puzzle_align.layout.model import AttentionBackend
from puzzle_align.layout.rows import RowLayout
from puzzle_align.models.attention.flex import FlexMask, attend_flex, row_block_mask
from puzzle_align.models.attention.mask import dense_mask
from puzzle_align.models.attention.masked import attend_masked
from puzzle_align.models.attention.segments import Pieces, attend_segments, cut_row
from puzzle_align.models.attention.varlen import Sequences, attend_varlen, row_sequences


@dataclass(frozen=True)
class AttentionPlan:
    """One row's structure as one backend takes it; the same for all layers, models and dtypes."""

    num_tokens: int
    structure: FlexMask | Tensor | Pieces | Sequences  # of flex, dense, segments, varlen


def prepare_attention(
    layout: RowLayout, backend: AttentionBackend, device: torch.device
) -> AttentionPlan:
    """The plan of a row, on ``device``. ValueError for an unknown backend."""
    match backend:
        case "flex" | "flex_flash":
            structure = FlexMask(row_block_mask(layout, device), backend == "flex_flash")
        case "dense":
            structure = dense_mask(layout, device)
        case "segments":
            structure = cut_row(layout, device)
        case "varlen":
            structure = row_sequences(layout, device)
        case _:
            known = ", ".join(get_args(AttentionBackend))
            raise ValueError(f"attention backend {backend!r}: use one of {known}")
    return AttentionPlan(layout.num_tokens, structure)


def attend(
    q: Tensor, k: Tensor, v: Tensor, plan: AttentionPlan, scale: float | None = None
) -> Tensor:
    """Attention within one row: q [1, h, S, d], k and v [1, g, S, d] -> [1, h, S, d].

    ``scale`` multiplies the scores; None is 1/sqrt(d). What padding gets is finite and otherwise
    the backend's own. On CPU, flex has no backward. ValueError if S is not the plan's.
    """
    if q.size(2) != plan.num_tokens:
        raise ValueError(
            f"attention: {q.size(2)} tokens in the row, but its AttentionPlan was prepared for"
            f" {plan.num_tokens}; prepare one from the microbatch's own layout"
        )
    structure = plan.structure
    if isinstance(structure, Pieces):
        return attend_segments(q, k, v, structure, scale)
    if isinstance(structure, Sequences):
        return attend_varlen(q, k, v, structure, scale)
    if isinstance(structure, FlexMask):
        return attend_flex(q, k, v, structure, scale)
    return attend_masked(q, k, v, structure, scale)
