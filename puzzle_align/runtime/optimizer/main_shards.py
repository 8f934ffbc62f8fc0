"""A distributed optimizer's main weights on this rank, as the source of resharding.

They are ready as soon as its step is done, before ranks gather the model's weights from them; a
bf16 model's weights are rounded from them. With ``PieceAdamW`` they are this rank's shards of the
model's weights, which its step has rounded already.
"""

from collections.abc import Iterable
from math import prod
from typing import Any

import torch.distributed as dist
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor

from puzzle_align.layout.main_weights import MainWeightHoldings, Range, ShardRange, flat_boxes
from puzzle_align.layout.rules import Piece, extents
from puzzle_align.models.shards import Shards
from puzzle_align.runtime.optimizer.optimizer import Optimizer
from puzzle_align.runtime.optimizer.state import main_weights, parts_of


class MainShards(Shards):
    """Flat shards of a model's main weights on this rank, read like the model's weights.

    They are views, which follow later steps. Unlike the model's weights they cannot share storage
    with a chunk.
    """

    def __init__(self, optimizer: Optimizer, holdings: MainWeightHoldings) -> None:
        """Open the shards of an optimizer.

        Args:
            optimizer: one with ``use_distributed_optimizer``.
            holdings: main-weight holdings of its model, plan and buckets.
        """
        super().__init__((), optimizer.context.spec)
        self._trained: dict[str, list[Tensor]] = {}
        ranges = _ranges(optimizer)
        for number, shards in enumerate(holdings.shards(dist.get_rank())):
            for shard in shards:
                parameter, numbers, main = ranges.pop((number, shard.parameter.name))
                assert numbers == shard.numbers, f"{shard.parameter.name}: {numbers}, {shard}"
                self._add(shard, parameter, main)
        assert not ranges, f"the layout has no shards of {list(ranges)}"

    def _add(self, shard: ShardRange, parameter: Tensor, main: Tensor) -> None:
        for part in flat_boxes(shard):
            shape = extents(part.box)
            view = main[part.start : part.start + prod(shape)].view(shape)
            piece = Piece(part.tensor, part.box, (0,) * len(shape))
            self._places.setdefault(part.tensor, []).append((piece, view))
            self._trained.setdefault(part.tensor, []).append(parameter)

    def parameters(self, tensors: Iterable[str]) -> list[Tensor]:
        """Return the parameters whose main weights on this rank are parts of these tensors."""
        values = (value for tensor in tensors for value in self._trained.get(tensor, ()))
        return list({id(value): value for value in values}.values())


def _ranges(optimizer: Optimizer) -> dict[tuple[int, str], tuple[Tensor, Range, Tensor]]:
    """Parameters, ranges and main weights of Megatron-core's optimizer, by chunk and name."""
    names: dict[Tensor, tuple[int, str]] = {
        value: (number, name)
        for number, chunk in enumerate(optimizer.context.chunks)
        for name, value in chunk.named_parameters()
    }
    ranges = {}
    for part in parts_of(optimizer.megatron):
        assert isinstance(part, DistributedOptimizer), "the optimizer is not distributed"
        range_of: Any = part._get_model_param_range_map
        for parameter, main in main_weights(part):
            numbers = range_of(parameter)["param"]
            ranges[names[parameter]] = parameter, (numbers.start, numbers.end), main.detach()
    return ranges
