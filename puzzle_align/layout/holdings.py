"""Who holds which box of a model's weights: one copy of the model, under a plan, on global ranks.

Invariants (the tests assert them):
- a rank holds one box of a tensor at most: its pieces of it, over all chunks, fill that box;
- two boxes of a tensor have nothing in common, and all of them together are the tensor.

``layout.main_weights`` tells the same of main weights, of which a rank may hold several boxes.
"""

from dataclasses import dataclass
from functools import cached_property

from puzzle_align.layout.divisibility import cut_problems
from puzzle_align.layout.model import ModelSpec
from puzzle_align.layout.plan import ParallelPlan
from puzzle_align.layout.rules import Box, Parameter, around
from puzzle_align.layout.topology import Topology
from puzzle_align.layout.weights import hf_shapes, parameter_boxes


@dataclass(frozen=True)
class Holdings:
    """The weights of a model under a plan; ``ranks`` are in the plan's order.

    Raises:
        ValueError: one line, where the plan does not divide the model: with the dimension.
    """

    model: ModelSpec
    plan: ParallelPlan
    ranks: tuple[int, ...]

    def __post_init__(self) -> None:
        for problem in cut_problems(self.model, self.plan, str(self.plan), "the model"):
            raise ValueError(problem)

    @cached_property
    def topology(self) -> Topology:
        """Where the plan's coordinates lie. ValueError if there are not as many ranks."""
        return Topology(self.plan, self.ranks)

    @cached_property
    def holders(self) -> dict[str, dict[Box, tuple[int, ...]]]:
        """By tensor, in the order of the model: every box that ranks hold, and these ranks."""
        found: dict[str, dict[Box, tuple[int, ...]]] = {}
        replicas = range(self.plan.data)
        for pipeline in range(self.plan.pipeline):
            for tensor in range(self.plan.tensor):
                ranks = tuple(self.topology.rank(pipeline, data, tensor) for data in replicas)
                for name, box in self._boxes(pipeline, tensor).items():
                    own = found.setdefault(name, {})
                    own[box] = own.get(box, ()) + ranks
        return {name: found[name] for name in hf_shapes(self.model)}

    def parameters(self, rank: int, *, fused_norms: bool = False) -> list[dict[str, Parameter]]:
        """The parameters of a rank by name, chunk by chunk (``layout.weights``)."""
        pipeline, _, tensor = self.topology.coordinates(rank)
        return [
            parameter_boxes(self.model, self.plan, position, tensor, fused_norms=fused_norms)
            for position in self.plan.positions_of(pipeline)
        ]

    def _boxes(self, pipeline: int, tensor: int) -> dict[str, Box]:
        """What a pipeline and tensor rank has of every tensor that it has something of."""
        boxes: dict[str, list[Box]] = {}
        for position in self.plan.positions_of(pipeline):
            for parameter in parameter_boxes(self.model, self.plan, position, tensor).values():
                for piece in parameter.pieces:
                    boxes.setdefault(piece.tensor, []).append(piece.box)
        return {name: around(own) for name, own in boxes.items()}
