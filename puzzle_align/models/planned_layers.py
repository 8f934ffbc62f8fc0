"""A plan's layers in Megatron's words: which a chunk has, and how many come before them."""

from typing import Any

from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

from puzzle_align.layout.model import ModelSpec
from puzzle_align.layout.plan import ParallelPlan


class PlannedLayers(PipelineParallelLayerLayout):
    """The layers by virtual position, seen from the one at ``position``.

    Megatron numbers a chunk's layers, in the model and in checkpoints, from the layers before it,
    and asks for those without saying where it is: its own answer reads the global state, which is
    never set.
    """

    def __init__(self, spec: ModelSpec, plan: ParallelPlan, position: int) -> None:
        layers = [
            plan.layers_of(number, spec.num_hidden_layers) for number in range(plan.num_positions)
        ]
        names = [["decoder"] * len(own) for own in layers]
        names[0].insert(0, "embedding")
        names[-1].append("loss")
        super().__init__(names, plan.pipeline)
        self._first = layers[position].start

    def get_layer_offset(self, *_args: Any, **_kwargs: Any) -> int:
        """Layers before the chunk's."""
        return self._first
