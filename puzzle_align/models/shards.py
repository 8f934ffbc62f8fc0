"""A rank's weights by the boxes of Hugging Face tensors that they hold, used in place."""

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from puzzle_align.layout.model import ModelSpec
from puzzle_align.layout.rules import Box, Parameter, Piece, Shape, overlap
from puzzle_align.models.chunk import ModelChunk
from puzzle_align.models.hf_weights import parameters_of
from puzzle_align.models.pieces import slices


class Shards:
    """The parameters of a model's chunks on one rank, whatever its plan."""

    def __init__(self, chunks: Sequence[ModelChunk], spec: ModelSpec) -> None:
        self._places: dict[str, list[tuple[Piece, Tensor]]] = {}
        self._whole: dict[tuple[Shape, tuple[Piece, ...]], Tensor] = {}
        for chunk in chunks:
            for parameter, value in _parameters(chunk, spec):
                self._whole[parameter.shape, parameter.pieces] = value
                for piece in parameter.pieces:
                    self._places.setdefault(piece.tensor, []).append((piece, value))

    def share(self, chunk: ModelChunk, spec: ModelSpec) -> None:
        """Give a chunk under another plan the storage of what it has in common with these.

        That is: of parameters that hold the same pieces in the same places. All others get zeros,
        which padding keeps.
        """
        for parameter, value in _parameters(chunk, spec):
            own = self._whole.get((parameter.shape, parameter.pieces))
            if own is not None and parameter.pieces and own.dtype == value.dtype:
                value.data = own.data
            else:
                value.data.zero_()

    def parameters(self, tensors: Iterable[str]) -> list[Tensor]:
        """The parameters that hold something of these tensors."""
        found = (value for tensor in tensors for _, value in self._places.get(tensor, ()))
        return list({id(value): value for value in found}.values())

    def view(self, tensor: str, box: Box, dtype: torch.dtype) -> Tensor | None:
        """The memory that holds a box of a tensor, row by row; None if it lies in several places,
        with gaps, or in another precision.
        """
        places = [p for p in self._places[tensor] if overlap(p[0].box, box) is not None]
        if len(places) != 1 or overlap(places[0][0].box, box) != box:
            return None
        piece, value = places[0]
        part = _part(value.detach(), piece, box)
        return part if part.dtype == dtype and part.is_contiguous() else None

    @torch.no_grad()
    def read(self, tensor: str, box: Box, into: Tensor) -> None:
        """Copy a box of a tensor, all of which must be here, to ``into``, of its extents."""
        for piece, value in self._places[tensor]:
            common = overlap(piece.box, box)
            if common is not None:
                into[_within(common, box)].copy_(_part(value, piece, common))

    @torch.no_grad()
    def write(self, tensor: str, box: Box, values: Tensor) -> None:
        """Copy ``values`` to wherever the tensor's box lies on this rank."""
        for piece, value in self._places[tensor]:
            common = overlap(piece.box, box)
            if common is not None:
                _part(value, piece, common).copy_(values[_within(common, box)])

    @torch.no_grad()
    def copy_from(self, other: "Shards", tensor: str, box: Box) -> None:
        """Copy a box that the same rank holds in another model, unless they share the storage."""
        storages = {value.untyped_storage().data_ptr() for _, value in other._places[tensor]}
        for piece, value in self._places[tensor]:
            common = overlap(piece.box, box)
            if common is not None and value.untyped_storage().data_ptr() not in storages:
                other.read(tensor, common, _part(value, piece, common))


def _parameters(chunk: ModelChunk, spec: ModelSpec) -> Iterator[tuple[Parameter, Tensor]]:
    values, group = dict(chunk.named_parameters()), chunk.pg_collection.tp
    for parameter in parameters_of(chunk, spec, group.size(), group.rank()):
        yield parameter, values[parameter.name]


def _part(value: Tensor, piece: Piece, box: Box) -> Tensor:
    """The view of a parameter that holds ``box``, which lies in the piece."""
    inside = _within(box, piece.box)
    return value[
        tuple(
            slice(s.start + first, s.stop + first)
            for s, first in zip(inside, piece.start, strict=True)
        )
    ]


def _within(box: Box, outer: Box) -> tuple[slice, ...]:
    """A box as an index of what a box around it holds."""
    return slices(
        tuple((a - first, b - first) for (a, b), (first, _) in zip(box, outer, strict=True))
    )
