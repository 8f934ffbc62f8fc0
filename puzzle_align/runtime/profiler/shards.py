"""Build a tensor shard of a model on this rank alone; measure optimizer step and merging."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from puzzle_align.config.sections.optimizer import OptimizerConfig
from puzzle_align.layout.model import ModelOptions, ModelSpec, without_adapters
from puzzle_align.layout.plan import ParallelPlan
from puzzle_align.models.chunk import ModelChunk
from puzzle_align.runtime.context import Context, build_context, freeze, make_trainable
from puzzle_align.runtime.groups.world import World, build_communicators
from puzzle_align.runtime.merged import Merged
from puzzle_align.runtime.optimizer.optimizer import Optimizer
from puzzle_align.runtime.profiler.timing import Samples, repeated, seconds

_ROLE = "profiled"
_STANDARD_DEVIATION = 0.02
_GRADIENT = 1e-3


@dataclass(frozen=True, kw_only=True)
class ShardSpec:
    """Shapes and options of the part of a model on one of ``tensor`` ranks."""

    spec: ModelSpec
    tensor: int
    vocab_rows: int  # of the embedding and of the head
    options: ModelOptions


@contextmanager
def open_shard(
    shard: ShardSpec, world: World, *, trained: OptimizerConfig | None
) -> Iterator[Context]:
    """Build the shard as a model on this rank; its memory is freed at the end.

    Args:
        trained: optimizer config of a trained shard; None: forward only.
    """
    plan = ParallelPlan()
    communicators = build_communicators(plan, world, [world.rank], trained=trained is not None)
    context = build_context(
        _ROLE,
        shard.spec,
        shard.options,
        plan,
        world,
        communicators=communicators,
        fill=_fill,
        vocab_rows=shard.vocab_rows,
    )
    try:
        if trained is None:
            freeze(context)
        else:
            make_trainable(context, trained)
        yield context
    finally:
        context.release()
        if world.device.type == "cuda":
            torch.cuda.empty_cache()


def measure_step(context: Context, config: OptimizerConfig, repeats: int) -> Samples:
    """Measure an optimizer step: seconds of zeroing, reducing, norm and AdamW, and ``parameters``.

    Args:
        context: wrapped by ``make_trainable`` with ``config``.
    """
    optimizer = Optimizer(context, config)

    def update() -> None:
        optimizer.reduce_gradients()
        optimizer.step(config.lr)

    def sample() -> Samples:
        zeroing = seconds(optimizer.zero_grad, context.device)
        for wrapper in context.wrappers:
            buffers: Any = wrapper.buffers  # gradient buffers: Megatron shadows a module's method
            for buffer in buffers:
                buffer.grad_data.fill_(_GRADIENT)
        return {"step": [zeroing + seconds(update, context.device)]}

    parameters = sum(
        p.numel() for chunk in context.chunks for p in chunk.parameters() if p.requires_grad
    )
    return {**repeated(sample, repeats), "parameters": [float(parameters)]}


def measure_merge(context: Context, shard: ShardSpec, world: World, repeats: int) -> Samples:
    """Measure seconds of adding adapters to a copy of the weights.

    Args:
        context: of ``shard``, a model with adapters; frozen.
    """
    base = replace(shard, spec=without_adapters(shard.spec))
    with open_shard(base, world, trained=None) as copy:
        merged = Merged(context, copy)

        def sample() -> Samples:
            with ExitStack() as stack:
                opened = merged.opened()
                return {"merge": [seconds(lambda: stack.enter_context(opened), world.device)]}

        return repeated(sample, repeats)


@torch.no_grad()
def _fill(chunk: ModelChunk) -> None:
    """Fill in weights that cause no infinite or denormal numbers."""
    for name, parameter in chunk.named_parameters():
        if parameter.dim() > 1:
            parameter.normal_(0.0, _STANDARD_DEVIATION)
        else:
            parameter.fill_(0.0 if name.endswith("bias") else 1.0)
