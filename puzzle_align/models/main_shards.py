"""A rank's shards of main weights by the boxes of Hugging Face tensors in them, used in place."""

from collections.abc import Iterable
from math import prod

from torch import Tensor

from puzzle_align.layout.grad_buffer import ShardRange
from puzzle_align.layout.main_weights import flat_boxes
from puzzle_align.layout.model import ModelSpec
from puzzle_align.layout.rules import Piece, extents
from puzzle_align.models.shards import Shards


class MainShards(Shards):
    """Flat shards of a model's main weights on one rank, read as the model's weights are.

    They have no form in common with a chunk: its storage is the model's to ``share``.
    """

    def __init__(
        self, shards: Iterable[tuple[ShardRange, Tensor, Tensor]], spec: ModelSpec
    ) -> None:
        """``shards``: ranges that the rank has, the model's parameter and the range's numbers."""
        super().__init__((), spec)
        self._trained: dict[str, list[Tensor]] = {}
        for shard, parameter, numbers in shards:
            for part in flat_boxes(shard):
                shape = extents(part.box)
                view = numbers[part.start : part.start + prod(shape)].view(shape)
                piece = Piece(part.tensor, part.box, (0,) * len(shape))
                self._places.setdefault(part.tensor, []).append((piece, view))
                self._trained.setdefault(part.tensor, []).append(parameter)

    def parameters(self, tensors: Iterable[str]) -> list[Tensor]:
        """The model's parameters whose main weights here hold something of these tensors."""
        found = (value for tensor in tensors for value in self._trained.get(tensor, ()))
        return list({id(value): value for value in found}.values())
