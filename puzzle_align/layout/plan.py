"""The parallel plan of one model: its layers and tensors over ranks, and checks that it fits.

Layers lie along the pipeline in order. A *virtual position* is one model chunk on one pipeline
rank: position ``chunk * P + rank``, from the embedding to the head. Every position has at least one
layer, also the two ends, where Megatron would allow embedding or head alone.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import isqrt

from puzzle_align.layout.model import ModelSpec, padded_vocab_size
from puzzle_align.schedules.registry import schedule_named, schedule_problem

MOST_RANKS = 2**14  # of a job


def divisors(number: int) -> list[int]:
    """Divisors of a number, 1 first."""
    small = [n for n in range(1, isqrt(number) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})


@dataclass(frozen=True, kw_only=True)
class ParallelPlan:
    """Sizes of one model's plan; rank order: tensor fastest, then data, then pipeline.

    ``virtual_pipeline`` is the number of model chunks on each pipeline rank (1: not interleaved).
    ``pipeline_layers`` are the numbers of layers by virtual position; empty: the same number at
    each. Leave equal numbers out, so that equal plans compare equal. ``schedule`` names the
    training schedule, a row of ``schedules.registry``; None: 1F1B, interleaved if there are several
    chunks.
    """

    pipeline: int = 1
    data: int = 1
    tensor: int = 1
    virtual_pipeline: int = 1
    sequence_parallel: bool = False
    pipeline_layers: tuple[int, ...] = ()
    schedule: str | None = None

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.pipeline * self.data * self.tensor

    @property
    def num_positions(self) -> int:
        """Number of virtual positions."""
        return self.pipeline * self.virtual_pipeline

    @property
    def microbatch_multiple(self) -> int:
        """Divisor that a replica's number of microbatches must have."""
        in_groups = schedule_named(self.schedule, self.virtual_pipeline).in_groups
        return self.pipeline if in_groups else 1

    @property
    def sequence_shards(self) -> int:
        """Parts of a row between layers: the tensor ranks under sequence parallelism, else 1."""
        return self.tensor if self.sequence_parallel else 1

    @property
    def grid(self) -> "ParallelPlan":
        """The plan without its layers; models with equal grids can share a pipeline."""
        return self._without_layers if self.pipeline_layers else self

    @cached_property
    def _without_layers(self) -> "ParallelPlan":
        return replace(self, pipeline_layers=())

    def layers_of(self, position: int, num_layers: int) -> range:
        """The layers (from 0) at a virtual position, for a model of ``num_layers``.

        The plan must fit the model (``division_problems``).
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
        """Number of layers on a pipeline rank, all its chunks together."""
        return sum(len(self.layers_of(p, num_layers)) for p in self.positions_of(rank))

    def __str__(self) -> str:
        sizes = f"P{self.pipeline}, D{self.data}, T{self.tensor}"
        return f"({sizes}, layers {layers_text(self)})" if self.pipeline_layers else f"({sizes})"


def layers_text(plan: ParallelPlan) -> str:
    """Text of the layers by position: ``3+2+2``, or with several chunks ``2+2 | 2+1``."""
    chunks = range(0, len(plan.pipeline_layers), plan.pipeline)
    return " | ".join(
        "+".join(map(str, plan.pipeline_layers[first : first + plan.pipeline])) for first in chunks
    )


class Topology:
    """The global rank of every coordinate of a plan: tensor fastest, then data, then pipeline."""

    def __init__(self, plan: ParallelPlan, ranks: Sequence[int] | None = None) -> None:
        self.plan = plan
        self.ranks = tuple(range(plan.world_size) if ranks is None else ranks)
        if len(self.ranks) != plan.world_size or len(set(self.ranks)) != len(self.ranks):
            raise ValueError(
                f"plan {plan} needs {plan.world_size} distinct ranks, not {list(self.ranks)}"
            )
        self._p, self._d, self._t = range(plan.pipeline), range(plan.data), range(plan.tensor)

    def rank(self, pipeline: int, data: int, tensor: int) -> int:
        """Global rank at a coordinate."""
        return self.ranks[tensor + self.plan.tensor * (data + self.plan.data * pipeline)]

    def coordinates(self, rank: int) -> tuple[int, int, int]:
        """``(pipeline, data, tensor)`` of a global rank of this plan."""
        place, tensor = divmod(self.ranks.index(rank), self.plan.tensor)
        pipeline, data = divmod(place, self.plan.data)
        return pipeline, data, tensor

    def tensor_groups(self) -> list[list[int]]:
        """Ranks of each tensor-parallel group."""
        return [[self.rank(p, d, t) for t in self._t] for p in self._p for d in self._d]

    def data_groups(self) -> list[list[int]]:
        """Ranks of each data-parallel group: equal weights, different data."""
        return [[self.rank(p, d, t) for d in self._d] for p in self._p for t in self._t]

    def pipeline_groups(self) -> list[list[int]]:
        """Ranks of each pipeline, in order."""
        return [[self.rank(p, d, t) for p in self._p] for d in self._d for t in self._t]

    def model_groups(self) -> list[list[int]]:
        """Ranks of each replica of the model."""
        return [[self.rank(p, d, t) for p in self._p for t in self._t] for d in self._d]

    def embedding_groups(self) -> list[list[int]]:
        """First and last rank of each pipeline, which share tied embeddings."""
        ends = sorted({0, self.plan.pipeline - 1})
        return [[self.rank(p, d, t) for p in ends] for d in self._d for t in self._t]


def plan_problems(plan: ParallelPlan, where: str) -> Iterator[str]:
    """Contradictions between a plan's settings, a line each; ``where`` is its dotted key."""
    if plan.virtual_pipeline > 1 and plan.pipeline == 1:
        yield (
            f"{where}.virtual_pipeline_model_parallel_size: {plan.virtual_pipeline} chunks need a "
            "pipeline; set it to 1, or pipeline_model_parallel_size above 1"
        )
    if problem := schedule_problem(plan.schedule, plan.virtual_pipeline):
        yield f"{where}.pipeline_schedule: {problem}"
    if plan.sequence_parallel and plan.tensor == 1:
        yield (
            f"{where}.sequence_parallel: true needs tensor ranks; set it to false, or "
            "tensor_model_parallel_size above 1"
        )


def division_problems(spec: ModelSpec, plan: ParallelPlan, where: str, model: str) -> Iterator[str]:
    """Dimensions of ``spec`` that the plan does not divide, a line each; ``model`` is its key."""
    cut = {
        "num_attention_heads": spec.num_attention_heads,
        "num_key_value_heads": spec.num_key_value_heads,
        "intermediate_size": spec.intermediate_size,
        "the padded vocab_size": padded_vocab_size(spec),
    }
    for name, value in cut.items():
        if value % plan.tensor:
            yield (
                f"{where}: tensor size {plan.tensor} does not divide {name}={value} of {model}; "
                f"choose a divisor of {value}"
            )
    yield from _layer_problems(spec.num_hidden_layers, plan, where, model)


def _layer_problems(num_layers: int, plan: ParallelPlan, where: str, model: str) -> Iterator[str]:
    """Mismatches between the model's number of layers and the plan's positions, a line each."""
    positions = plan.num_positions
    layers, key = plan.pipeline_layers, f"{where}.pipeline_layers"
    sizes = "pipeline times virtual pipeline"
    if num_layers < positions:
        yield (
            f"{where}: {sizes} size {positions} is more than num_hidden_layers={num_layers} of "
            f"{model}; choose at most {num_layers}"
        )
    elif not layers and num_layers % positions:
        yield (
            f"{where}: {sizes} size {positions} does not divide num_hidden_layers={num_layers} of "
            f"{model}; set {key}=auto"
        )
    elif layers and len(layers) != positions:
        yield (
            f"{key}: {len(layers)} numbers for {sizes} size {positions}; give one for each position"
        )
    elif layers and min(layers) < 1:
        yield f"{key}: {min(layers)} layers at a position; give every position at least 1"
    elif layers and sum(layers) != num_layers:
        yield (
            f"{key}: {layers_text(plan)} is {sum(layers)} layers, not num_hidden_layers="
            f"{num_layers} of {model}; change the numbers, or set it to auto"
        )
