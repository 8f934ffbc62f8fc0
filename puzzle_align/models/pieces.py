"""A rank's parameter put together from Hugging Face tensors, and taken apart again, bit for bit."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from puzzle_align.layout.rules import Box, Parameter, Shape, around

Read = Callable[[str, Shape, Box], Tensor]  # the box of a tensor of that name and whole shape


def fill(target: Tensor, parameter: Parameter, read: Read) -> None:
    """Put the parameter's pieces into ``target``, in place; each tensor is read once."""
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
                inside = tuple(
                    (start - first, end - first)
                    for (start, end), (first, _) in zip(piece.box, bounds, strict=True)
                )
                target[slices(piece.place)].copy_(part[slices(inside)])


def take_apart(value: Tensor, parameter: Parameter) -> Iterator[tuple[str, Tensor]]:
    """The Hugging Face tensors of a parameter that has all of them: on the one tensor rank."""
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
    """A box as an index."""
    return tuple(slice(start, end) for start, end in box)
