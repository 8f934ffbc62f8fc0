"""A model with adapters as one without: they are added to the weights for a phase.

``W + scaling * B A`` is computed in float32 and rounded to the model's precision.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from puzzle_align.layout.rules import Box, Piece
from puzzle_align.layout.weights import is_adapter
from puzzle_align.models.shards import Shards, slices
from puzzle_align.runtime.context import Context, free_copy


class Merged:
    """A copy of a model under its own plan, with its adapters in the weights while it is open.

    Adapted weights then have memory of their own; all others are the model's. Its modules are built
    once.
    """

    def __init__(self, source: Context, copy: Context) -> None:
        """``copy``: a frozen model like ``source`` without adapters, whose memory is freed."""
        self._copy, self._merged = copy, Shards(copy.chunks, copy.spec)
        self._adapted = Shards(source.chunks, source.spec)
        free_copy(copy)

    @contextmanager
    def opened(self) -> Iterator[Context]:
        """Yield the copy with the current weights."""
        self._adapted.lend(self._merged)
        merge(self._merged, self._adapted)
        for chunk in self._copy.chunks:
            chunk.mark_changed()
        try:
            yield self._copy
        finally:
            free_copy(self._copy)


@torch.no_grad()
def merge(copy: Shards, adapted: Shards) -> None:
    """Add the adapters to the weights of ``copy`` that have some, each in memory of its own."""
    lora = adapted.spec.lora
    assert lora is not None
    held = {
        piece.tensor: (piece.box, value[slices(piece.place)].float())
        for parameter, value in adapted.held
        if is_adapter(parameter.name)
        for piece in parameter.pieces
    }
    for parameter, value in copy.held:
        added = {piece: _product(piece, held) for piece in parameter.pieces}
        if any(product is not None for product in added.values()):
            whole = value.to(torch.float32, copy=True)
            for piece, product in added.items():
                if product is not None:
                    whole[slices(piece.place)] += lora.scaling * product
            value.data = whole.to(value.dtype)


def _product(piece: Piece, held: Mapping[str, tuple[Box, Tensor]]) -> Tensor | None:
    """``B A`` of a piece of a weight, of a rank's boxes of adapters; None: it has none."""
    stem = piece.tensor.removesuffix(".weight")
    if f"{stem}.lora_A.weight" not in held:
        return None
    (a_box, a), (b_box, b) = (held[f"{stem}.lora_{letter}.weight"] for letter in "AB")
    (first_row, last_row), columns = piece.box
    assert columns == a_box[1], "pieces of a weight are cut by rows"
    return b[first_row - b_box[0][0] : last_row - b_box[0][0]] @ a
