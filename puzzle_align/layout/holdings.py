"""Boxes of a model's weights under a plan, and the global ranks that hold them.

Invariants (the tests assert them):
- a rank holds at most one box of a tensor, which its pieces of the tensor, over all chunks, fill;
- two boxes of a tensor are disjoint, and all boxes together cover the tensor.

``layout.main_weights`` does the same for main weights, of which a rank may hold several boxes.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

from puzzle_align.layout.model import ModelSpec
from puzzle_align.layout.plan import ParallelPlan, Topology, division_problems
from puzzle_align.layout.rules import Box, Parameter, around
from puzzle_align.layout.weights import (
    chunk_parameters,
    layer_parameters,
    layer_prefix,
    parameter_boxes,
    tensor_shapes,
)


@dataclass(frozen=True)
class Holdings:
    """Weights of a model under a plan; ``ranks`` are in the plan's order.

    Raises:
        ValueError: one line with the dimension, if the plan does not divide the model.
    """

    model: ModelSpec
    plan: ParallelPlan
    ranks: tuple[int, ...]

    def __post_init__(self) -> None:
        for problem in division_problems(self.model, self.plan, str(self.plan), "the model"):
            raise ValueError(problem)

    @cached_property
    def topology(self) -> Topology:
        """Topology of the plan on its ranks. ValueError if their numbers differ."""
        return Topology(self.plan, self.ranks)

    @cached_property
    def holders(self) -> dict[str, dict[Box, tuple[int, ...]]]:
        """Ranks that hold each box, by tensor in the order of the model."""
        holders: dict[str, dict[Box, tuple[int, ...]]] = {
            name: {} for name in tensor_shapes(self.model)
        }
        replicas = range(self.plan.data)
        for pipeline in range(self.plan.pipeline):
            for tensor in range(self.plan.tensor):
                ranks = tuple(self.topology.rank(pipeline, data, tensor) for data in replicas)
                for name, box in self._boxes(pipeline, tensor):
                    boxes = holders[name]
                    boxes[box] = boxes.get(box, ()) + ranks
        return holders

    def parameters(self, rank: int) -> list[dict[str, Parameter]]:
        """Parameters of a rank by name, for each chunk (``layout.weights``)."""
        pipeline, _, tensor = self.topology.coordinates(rank)
        return [
            parameter_boxes(self.model, self.plan, position, tensor)
            for position in self.plan.positions_of(pipeline)
        ]

    def _boxes(self, pipeline: int, tensor: int) -> Iterator[tuple[str, Box]]:
        """Names and boxes of the tensors that a pipeline and tensor rank holds."""
        positions, number = self.plan.positions_of(pipeline), self.model.num_hidden_layers
        ends = (
            parameter
            for position in positions
            for parameter in chunk_parameters(
                self.model,
                range(0),
                is_first=position == 0,
                is_last=position == self.plan.num_positions - 1,
                tensor_size=self.plan.tensor,
                tensor_rank=tensor,
            )
        )
        yield from _around_pieces(ends).items()
        for position in positions:
            for layer in self.plan.layers_of(position, number):
                prefix = layer_prefix(layer)
                for name, box in self._of_layer[tensor].items():
                    yield f"{prefix}{name}", box

    @cached_property
    def _of_layer(self) -> list[dict[str, Box]]:
        """Boxes of a layer's tensors by tensor rank, equal for all layers."""
        size = self.plan.tensor
        return [_around_pieces(layer_parameters(self.model, size, rank)) for rank in range(size)]


def _around_pieces(parameters: Iterable[Parameter]) -> dict[str, Box]:
    """Smallest box around all pieces of a tensor, by tensor."""
    boxes: dict[str, list[Box]] = {}
    for parameter in parameters:
        for piece in parameter.pieces:
            boxes.setdefault(piece.tensor, []).append(piece.box)
    return {name: around(parts) for name, parts in boxes.items()}
