"""How a model is spread over ranks."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class ParallelPlan:
    """Sizes of one model's plan; rank order: tensor fastest, then data, then pipeline.

    ``virtual_pipeline`` is the number of model chunks on each pipeline rank (1: not interleaved).
    """

    pipeline: int = 1
    data: int = 1
    tensor: int = 1
    virtual_pipeline: int = 1
    sequence_parallel: bool = False

    @property
    def world_size(self) -> int:
        """Ranks the plan needs."""
        return self.pipeline * self.data * self.tensor

    def __str__(self) -> str:
        return f"(P{self.pipeline}, D{self.data}, T{self.tensor})"
