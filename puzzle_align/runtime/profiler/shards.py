"""A tensor shard of a model, on this rank alone."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from puzzle_align.config.sections.optimizer import OptimizerConfig
from puzzle_align.layout.model import ModelOptions, ModelSpec
from puzzle_align.layout.plan import ParallelPlan
from puzzle_align.models.build import ModelChunk
from puzzle_align.runtime.context import Context, build_context, freeze, make_trainable
from puzzle_align.runtime.groups.communicators import build_communicators
from puzzle_align.runtime.groups.world import World

_ROLE = "profiled"
_SEED = 0
_STANDARD_DEVIATION = 0.02


@dataclass(frozen=True, kw_only=True)
class ShardSpec:
    """A shard's own shapes, and how it is computed; ``vocab_rows`` as ``build_chunk``'s."""

    spec: ModelSpec
    vocab_rows: int
    options: ModelOptions


@contextmanager
def open_shard(
    shard: ShardSpec, world: World, *, trained: OptimizerConfig | None
) -> Iterator[Context]:
    """The shard as a model of its own, on this rank; its memory is given back at the end.

    Args:
        trained: of what is to be trained, its optimizer; None: only run forward.
    """
    plan = ParallelPlan()
    own = build_communicators(plan, world, [world.rank], trained=trained is not None)
    context = build_context(
        _ROLE,
        shard.spec,
        shard.options,
        plan,
        world,
        communicators=own,
        fill=_fill,
        seed=_SEED,
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


@torch.no_grad()
def _fill(chunk: ModelChunk) -> None:
    """Any weights will do from which no infinite or denormal numbers come."""
    for name, parameter in chunk.named_parameters():
        if parameter.dim() > 1:
            parameter.normal_(0.0, _STANDARD_DEVIATION)
        else:
            parameter.fill_(0.0 if name.endswith("bias") else 1.0)
