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
    """Flat shards of a model's parameters on one rank, read as the parameters themselves are."""

    def __init__(self, shards: Iterable[tuple[ShardRange, Tensor]], spec: ModelSpec) -> None:
        """``shards``: the ranges that the rank has, each with its numbers, one behind the other."""
        super().__init__((), spec)
        for shard, values in shards:
            for part in flat_boxes(shard):
                shape = extents(part.box)
                view = values[part.start : part.start + prod(shape)].view(shape)
                piece = Piece(part.tensor, part.box, (0,) * len(shape))
                self._places.setdefault(part.tensor, []).append((piece, view))
