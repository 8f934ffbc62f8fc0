"""All tensors that a row holds on its device, so that two rows can be compared."""

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any

import torch
from torch.nn.attention.flex_attention import BlockMask

from puzzle_align.models.attention import segments
from puzzle_align.runtime.row_input import RowInput
from tests.unit.test_block_mask import TENSORS as BLOCK_TENSORS


def row_tensors(row: RowInput) -> dict[str, torch.Tensor]:
    """The row's tensors by name; those of its mask begin with ``mask``."""
    held = {f.name: getattr(row, f.name) for f in fields(row)}
    held |= {f.name: getattr(row.predictions, f.name) for f in fields(row.predictions)}
    tensors = {name: value for name, value in held.items() if isinstance(value, torch.Tensor)}
    return tensors | dict(_structure_tensors("mask", row.attention.structure))


def _structure_tensors(name: str, part: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors of a backend's structure; TypeError for an unknown part, which may hold some."""
    if isinstance(part, torch.Tensor):
        yield name, part
    elif isinstance(part, BlockMask):
        yield from ((f"{name}.{field}", getattr(part, field)) for field in BLOCK_TENSORS)
        places = torch.arange(part.seq_lengths[0], device=part.kv_indices.device)
        yield f"{name}.mod", part.mask_mod(places, places, places[:, None], places[None])
    elif isinstance(part, segments.Pieces):  # its masks are made when they are first used
        for number, piece in enumerate(part.pieces):
            if piece.kind is segments.PieceKind.BRANCH:
                yield f"{name}.{number}", part.mask(piece, torch.float32)
    elif is_dataclass(part):
        for field in fields(part):
            yield from _structure_tensors(f"{name}.{field.name}", getattr(part, field.name))
    elif isinstance(part, dict | tuple):
        items = part.items() if isinstance(part, dict) else enumerate(part)
        for key, item in items:
            yield from _structure_tensors(f"{name}.{key}", item)
    elif not isinstance(part, int | Enum | None):
        raise TypeError(f"{name}: {type(part).__name__}")
