"""The parallel plan of one model: its layers and tensors over ranks.

A model's layers lie along its pipeline in order. A *virtual position* is one model chunk on one
pipeline rank: position ``chunk * P + rank``, from the embedding to the head.
"""

from dataclasses import dataclass, replace
from functools import cached_property

from puzzle_align.schedules.registry import schedule_named

MOST_RANKS = 2**14  # of a job


@dataclass(frozen=True, kw_only=True)
class ParallelPlan:
    """Sizes of one model's plan; rank order: tensor fastest, then data, then pipeline.

    ``virtual_pipeline`` is the number of model chunks on each pipeline rank (1: not interleaved).
    ``pipeline_layers`` are the layers by virtual position; none: as many at each. Equal numbers are
    best left out, so that equal plans compare equal. A list is taken too, as JSON has it.
    ``schedule`` names a row of ``schedules.registry``, which trained models run; None: 1F1B,
    interleaved where there are several chunks.
    """

    pipeline: int = 1
    data: int = 1
    tensor: int = 1
    virtual_pipeline: int = 1
    sequence_parallel: bool = False
    pipeline_layers: tuple[int, ...] = ()
    schedule: str | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "pipeline_layers", tuple(self.pipeline_layers))

    @property
    def world_size(self) -> int:
        """Ranks the plan needs."""
        return self.pipeline * self.data * self.tensor

    @property
    def num_positions(self) -> int:
        """Virtual positions of the pipeline."""
        return self.pipeline * self.virtual_pipeline

    @property
    def microbatch_multiple(self) -> int:
        """Number that a replica's microbatches are a multiple of."""
        in_groups = schedule_named(self.schedule, self.virtual_pipeline).in_groups
        return self.pipeline if in_groups else 1

    @property
    def grid(self) -> "ParallelPlan":
        """The plan without its layers; models with equal grids can share a pipeline."""
        return self._without_layers if self.pipeline_layers else self

    @cached_property
    def _without_layers(self) -> "ParallelPlan":
        return replace(self, pipeline_layers=())

    def layers_of(self, position: int, num_layers: int) -> range:
        """The layers (from 0) at a virtual position, of a model with ``num_layers`` in all.

        The plan must fit the model (``layout.divisibility``).
        """
        split = self.pipeline_layers
        if not split:
            each, rest = divmod(num_layers, self.num_positions)
            assert rest == 0, f"{self} does not divide {num_layers} layers"
            return range(position * each, (position + 1) * each)
        assert len(split) == self.num_positions and sum(split) == num_layers, (
            f"{self}, {num_layers}"
        )
        first = sum(split[:position])
        return range(first, first + split[position])

    def positions_of(self, rank: int) -> range:
        """The virtual positions of a pipeline rank, chunk by chunk."""
        return range(rank, self.num_positions, self.pipeline)

    def num_layers_on(self, rank: int, num_layers: int) -> int:
        """Layers on a pipeline rank, all its chunks together."""
        if self.pipeline_layers:
            return sum(self.pipeline_layers[rank :: self.pipeline])
        return self.virtual_pipeline * len(self.layers_of(rank, num_layers))

    def __str__(self) -> str:
        sizes = f"P{self.pipeline}, D{self.data}, T{self.tensor}"
        return f"({sizes}, layers {layers_text(self)})" if self.pipeline_layers else f"({sizes})"


def layers_text(plan: ParallelPlan) -> str:
    """The layers by position, for people: ``3+2+2``, and chunk by chunk ``2+2 | 2+1``."""
    chunks = range(0, len(plan.pipeline_layers), plan.pipeline)
    return " | ".join(
        "+".join(map(str, plan.pipeline_layers[first : first + plan.pipeline])) for first in chunks
    )
