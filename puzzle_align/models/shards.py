"""A rank's weights by boxes of Hugging Face tensors: filled, read and written in place."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from puzzle_align.layout.model import ModelSpec
from puzzle_align.layout.rules import Box, Parameter, Piece, Shape, around, overlap
from puzzle_align.layout.weights import chunk_parameters, is_adapter, is_base, is_trained

if TYPE_CHECKING:
    from puzzle_align.models.chunk import ModelChunk

Read = Callable[[str, Shape, Box], Tensor]  # reads a box of a tensor, given its whole shape


def parameters_of(chunk: "ModelChunk", spec: ModelSpec) -> Iterator[tuple[Parameter, Tensor]]:
    """Parameters of a built chunk on this tensor rank: their pieces of tensors, and their values.

    Every parameter of the chunk comes once; its adapters only if ``spec`` has them.
    """
    layers: Any = chunk.decoder.layers
    first, group = layers[0].layer_number - 1, chunk.pg_collection.tp
    adapted = spec.lora is not None
    values = {n: p for n, p in chunk.named_parameters() if adapted or not is_adapter(n)}
    for parameter in chunk_parameters(
        spec,
        range(first, first + len(layers)),
        is_first=chunk.is_first,
        is_last=chunk.is_last,
        tensor_size=group.size(),
        tensor_rank=group.rank(),
        fused_norms=any("layer_norm_weight" in name for name in values),
    ):
        yield parameter, values.pop(parameter.name)
    assert not values, {*values}


def fill(target: Tensor, parameter: Parameter, read: Read) -> None:
    """Fill ``target`` in place with the parameter's pieces; each tensor is read once."""
    assert tuple(target.shape) == parameter.shape, f"{parameter.name}: {tuple(target.shape)}"
    with torch.no_grad():
        target.zero_()
        for name, shape in parameter.tensors:
            pieces = [piece for piece in parameter.pieces if piece.tensor == name]
            if not pieces:
                continue
            bounds = around([piece.box for piece in pieces])
            part = read(name, shape, bounds)
            for piece in pieces:
                target[slices(piece.place)].copy_(part[_within(piece.box, bounds)])


def take_apart(value: Tensor, parameter: Parameter) -> Iterator[tuple[str, Tensor]]:
    """Hugging Face tensors of a parameter with all their pieces, as under one tensor rank."""
    for name, shape in parameter.tensors:
        pieces = [piece for piece in parameter.pieces if piece.tensor == name]
        if len(pieces) == 1:
            yield name, value[slices(pieces[0].place)]
            continue
        whole = value.new_empty(shape)
        for piece in pieces:
            whole[slices(piece.box)] = value[slices(piece.place)]
        yield name, whole


def slices(box: Box) -> tuple[slice, ...]:
    """Index of a box."""
    return tuple(slice(start, end) for start, end in box)


class Shards:
    """Parameters of a model's chunks on one rank, under any plan.

    They stay valid while the chunks are: they follow the parameters to other memory.
    """

    def __init__(self, chunks: Sequence["ModelChunk"], spec: ModelSpec) -> None:
        self.spec = spec
        self.held = [each for chunk in chunks for each in parameters_of(chunk, spec)]
        self._places: dict[str, list[tuple[Piece, Tensor]]] = {}
        self._whole: dict[tuple[Shape, tuple[Piece, ...]], Tensor] = {}
        for parameter, value in self.held:
            self._whole[parameter.shape, parameter.pieces] = value
            for piece in parameter.pieces:
                self._places.setdefault(piece.tensor, []).append((piece, value))

    def share(self, copy: "Shards", *, is_first: bool = True) -> None:
        """Give a copy under another plan memory: that of equal parameters here, or of its own.

        Parameters are equal if they have the same pieces in the same places. Memory of its own is
        undefined, except for padding, which is zero.

        Args:
            is_first: whether the base has no memory yet, either; it keeps it.
        """
        for parameter, value in copy.held:
            if not is_first and not is_trained(copy.spec, parameter.name):
                continue
            same = self._whole.get((parameter.shape, parameter.pieces))
            if same is not None and parameter.pieces and same.dtype == value.dtype:
                value.data = same.data
            elif parameter.is_whole:
                value.data = value.new_empty(parameter.shape)
            else:
                value.data = value.new_zeros(parameter.shape)

    def lend(self, other: "Shards") -> frozenset[str]:
        """Put the base of another model in this memory, which nothing may train.

        Its other parameters get uninitialised memory of their own: adapters, a scalar head, output
        embeddings if this model has a scalar head.

        Returns:
            Names of the parameters that are here.
        """
        lent = set()
        for parameter, value in other.held:
            same = self._whole.get((parameter.shape, parameter.pieces))
            if same is not None and is_base(other.spec, parameter.name):
                value.data = same.data
                lent.add(parameter.name)
            else:
                value.data = value.new_empty(parameter.shape)
        return frozenset(lent)

    def parameters(self, tensors: Iterable[str]) -> list[Tensor]:
        """Parameters with a piece of any of these tensors."""
        values = (value for tensor in tensors for _, value in self._places.get(tensor, ()))
        return list({id(value): value for value in values}.values())

    def view(self, tensor: str, box: Box, dtype: torch.dtype) -> Tensor | None:
        """A contiguous view of a box of a tensor in ``dtype``.

        None if the box is in several places, not contiguous, or in another precision.
        """
        places = [p for p in self._places[tensor] if overlap(p[0].box, box) is not None]
        if len(places) != 1 or overlap(places[0][0].box, box) != box:
            return None
        piece, value = places[0]
        part = _part(value.detach(), piece, box)
        return part if part.dtype == dtype and part.is_contiguous() else None

    @torch.no_grad()
    def read(self, tensor: str, box: Box, into: Tensor) -> None:
        """Copy a box of a tensor to ``into``; all of it must be on this rank."""
        for piece, value in self._places[tensor]:
            common = overlap(piece.box, box)
            if common is not None:
                into[_within(common, box)].copy_(_part(value, piece, common))

    @torch.no_grad()
    def write(self, tensor: str, box: Box, values: Tensor) -> None:
        """Copy ``values`` to all places of the tensor's box on this rank."""
        for piece, value in self._places[tensor]:
            common = overlap(piece.box, box)
            if common is not None:
                _part(value, piece, common).copy_(values[_within(common, box)])

    @torch.no_grad()
    def copy_from(self, other: "Shards", tensor: str, box: Box) -> None:
        """Copy a box from this rank's shards under another plan, except where storage is shared."""
        storages = {value.untyped_storage().data_ptr() for _, value in other._places[tensor]}
        for piece, value in self._places[tensor]:
            common = overlap(piece.box, box)
            if common is not None and value.untyped_storage().data_ptr() not in storages:
                other.read(tensor, common, _part(value, piece, common))


def _part(value: Tensor, piece: Piece, box: Box) -> Tensor:
    """View of a parameter at ``box``, which must be inside the piece."""
    return value[slices(piece.place)][_within(box, piece.box)]


def _within(box: Box, outer: Box) -> tuple[slice, ...]:
    """Index of a box relative to the start of an outer box."""
    return slices(
        tuple((a - first, b - first) for (a, b), (first, _) in zip(box, outer, strict=True))
    )
