"""Rank <-> (pipeline, data, tensor) of one plan: tensor fastest, then data, then pipeline."""

from collections.abc import Sequence

from puzzle_align.layout.plan import ParallelPlan


class Topology:
    """The global rank of every coordinate of a plan."""

    def __init__(self, plan: ParallelPlan, ranks: Sequence[int] | None = None) -> None:
        self.plan = plan
        self.ranks = tuple(range(plan.world_size) if ranks is None else ranks)
        if len(self.ranks) != plan.world_size or len(set(self.ranks)) != len(self.ranks):
            raise ValueError(
                f"plan {plan} needs {plan.world_size} distinct ranks, not {list(self.ranks)}"
            )

    def rank(self, pipeline: int, data: int, tensor: int) -> int:
        """Global rank at a coordinate."""
        return self.ranks[tensor + self.plan.tensor * (data + self.plan.data * pipeline)]

    def coordinates(self, rank: int) -> tuple[int, int, int]:
        """``(pipeline, data, tensor)`` of a global rank of this plan."""
        place, tensor = divmod(self.ranks.index(rank), self.plan.tensor)
        pipeline, data = divmod(place, self.plan.data)
        return pipeline, data, tensor

    def tensor_groups(self) -> list[list[int]]:
        """Ranks that share a layer's weights."""
        return [[self.rank(p, d, t) for t in self._t] for p in self._p for d in self._d]

    def data_groups(self) -> list[list[int]]:
        """Ranks that hold the same shard and read different data."""
        return [[self.rank(p, d, t) for d in self._d] for p in self._p for t in self._t]

    def pipeline_groups(self) -> list[list[int]]:
        """Ranks of one pipeline, in order."""
        return [[self.rank(p, d, t) for p in self._p] for d in self._d for t in self._t]

    def model_groups(self) -> list[list[int]]:
        """Ranks that together hold one replica."""
        return [[self.rank(p, d, t) for p in self._p for t in self._t] for d in self._d]

    def embedding_groups(self) -> list[list[int]]:
        """First and last pipeline rank, which share tied embeddings."""
        ends = sorted({0, self.plan.pipeline - 1})
        return [[self.rank(p, d, t) for p in ends] for d in self._d for t in self._t]

    @property
    def _p(self) -> range:
        return range(self.plan.pipeline)

    @property
    def _d(self) -> range:
        return range(self.plan.data)

    @property
    def _t(self) -> range:
        return range(self.plan.tensor)
