"""Models whose weights are from a seed, under any plan, and batches of random pairs for them."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from puzzle_align.config.sections.optimizer import OptimizerConfig
from puzzle_align.data.dataset import ExampleDataset, from_examples
from puzzle_align.data.loader import DataView, ExampleLoader
from puzzle_align.layout.model import ModelOptions, ModelSpec, without_adapters
from puzzle_align.layout.plan import ParallelPlan
from puzzle_align.layout.rules import Box, Shape
from puzzle_align.models.chunk import ModelChunk
from puzzle_align.models.hf.adapters import NewAdapters
from puzzle_align.models.hf.sources import RandomSource, generator_of
from puzzle_align.models.hf.weights import load_adapters, load_weights
from puzzle_align.models.shards import slices
from puzzle_align.runtime.context import Context, build_context, make_trainable
from puzzle_align.runtime.groups.world import Communicators, World, build_communicators
from puzzle_align.runtime.optimizer.optimizer import Optimizer


def plan(
    pipeline: int,
    data: int,
    tensor: int,
    chunks: int = 1,
    sp: bool = False,
    layers: tuple[int, ...] = (),
) -> ParallelPlan:
    """A plan by its sizes."""
    return ParallelPlan(
        pipeline=pipeline,
        data=data,
        tensor=tensor,
        virtual_pipeline=chunks,
        sequence_parallel=sp,
        pipeline_layers=layers,
    )


def random_context(
    spec: ModelSpec,
    plan: ParallelPlan,
    world: World,
    *,
    seed: int,
    role: str = "actor",
    ranks: Sequence[int] | None = None,
    trained: bool = True,
    communicators: Communicators | None = None,
    **options: Any,
) -> Context:
    """This rank's part of a model, on groups of its own where none are given."""
    if communicators is None:
        communicators = build_communicators(plan, world, ranks, trained=trained)
    return build_context(
        role,
        spec,
        ModelOptions(**options),
        plan,
        world,
        communicators=communicators,
        fill=lambda chunk: _fill(chunk, spec, seed),
    )


def _fill(chunk: ModelChunk, spec: ModelSpec, seed: int) -> None:
    load_weights(chunk, without_adapters(spec), RandomSource(spec, seed))
    if spec.lora is not None:
        load_adapters(chunk, spec, DrawnAdapters(False, seed))


class DrawnAdapters(NewAdapters):
    """Adapters whose B is not 0."""

    def read(self, name: str, shape: Shape, box: Box) -> torch.Tensor:
        """Draw what is at a box of a tensor."""
        if "lora_A" in name:
            return super().read(name, shape, box)
        return 0.3 * torch.randn(shape, generator=generator_of(3, name))[slices(box)]


def trainable(context: Context, config: OptimizerConfig) -> Optimizer:
    """The model's optimizer, for which its chunks are wrapped; gradients are zero."""
    make_trainable(context, config)
    optimizer = Optimizer(context, config)
    optimizer.zero_grad()
    return optimizer


def make_pairs(num_pairs: int, vocab_size: int, seed: int) -> ExampleDataset:
    """Random pairs of uneven lengths."""
    rng = np.random.default_rng(seed)

    def part(low: int, high: int) -> list[int]:
        return rng.integers(0, vocab_size, rng.integers(low, high)).tolist()

    return from_examples([(part(1, 16), [part(1, 10), part(1, 10)]) for _ in range(num_pairs)], 0)


def pair_loader(
    pairs: ExampleDataset, context: Context, batch_size: int, **rows: Any
) -> ExampleLoader:
    """Batches for a model as its plan needs them; ``rows`` say how theirs are made."""
    plan = context.plan
    return ExampleLoader(
        pairs,
        global_batch_size=batch_size,
        **{"row_tokens": 64, "layout": "shared", "packed": True, **rows},
        scope="batch",
        seed=3,
        shuffle=True,
        view=DataView(
            data_rank=context.data_rank,
            data_size=plan.data,
            microbatch_multiple=plan.pipeline if plan.virtual_pipeline > 1 else 1,
            sequence_multiple=plan.tensor if plan.sequence_parallel else 1,
        ),
    )
