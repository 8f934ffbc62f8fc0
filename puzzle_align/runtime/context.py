"""A context: one role's model under one parallel plan, on a set of ranks."""

import gc
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.module import MegatronModule

from puzzle_align.config.sections.optimizer import OptimizerConfig
from puzzle_align.layout.model import ModelOptions, ModelSpec
from puzzle_align.layout.plan import ParallelPlan
from puzzle_align.models.build import ModelChunk, build_chunk
from puzzle_align.models.cpu import install_cpu_patches
from puzzle_align.models.megatron_config import DTYPES
from puzzle_align.runtime.groups.communicators import Communicators, PipelineLinks
from puzzle_align.runtime.groups.world import World


@dataclass
class Context:
    """A model that is placed: its chunks on this rank and the groups they talk through.

    ``modules`` are what a forward calls: the chunks, or their gradient-reducing wrappers.
    """

    role: str
    spec: ModelSpec
    plan: ParallelPlan
    groups: ProcessGroupCollection
    links: PipelineLinks
    chunks: list[ModelChunk]
    modules: list[MegatronModule]
    dtype: torch.dtype
    device: torch.device

    @property
    def precision(self) -> str:
        """The weights' precision as configs name it."""
        return next(name for name, dtype in DTYPES.items() if dtype is self.dtype)

    @property
    def pipeline_rank(self) -> int:
        """This rank's position in the pipeline."""
        return self.groups.pp.rank()

    @property
    def data_rank(self) -> int:
        """This rank's replica."""
        return self.groups.dp.rank()

    @property
    def is_output_rank(self) -> bool:
        """Tell whether this rank holds its replica's output: tensor rank 0, last pipeline rank."""
        return self.groups.tp.rank() == 0 and self.pipeline_rank == self.plan.pipeline - 1

    def sum_over_ranks(self, values: torch.Tensor) -> torch.Tensor:
        """``values`` (any shape) summed over this context's ranks, in place. Collective on them."""
        dist.all_reduce(values, group=self.groups.intra_dist_opt)
        return values

    @property
    def wrappers(self) -> list[DistributedDataParallel]:
        """The modules of a trainable context."""
        assert all(isinstance(module, DistributedDataParallel) for module in self.modules)
        return cast(list[DistributedDataParallel], self.modules)

    @property
    def communicators(self) -> Communicators:
        """The model's groups and links: after ``release`` it can be built again on them."""
        return Communicators(self.groups, self.links)

    def release(self) -> None:
        """Give the weights, the gradient buffers and their wrappers back; the groups stay.

        An optimizer holds the weights too: whoever has one lets go of it before.
        """
        self.modules = []
        self.chunks = []
        gc.collect()  # a wrapper and the hooks on its parameters hold each other

    def activation_shape(self, num_tokens: int) -> tuple[int, int, int]:
        """Shape of what crosses a pipeline edge for a row of ``num_tokens``."""
        shards = self.plan.tensor if self.plan.sequence_parallel else 1
        return num_tokens // shards, 1, self.spec.hidden_size


def build_context(
    role: str,
    spec: ModelSpec,
    options: ModelOptions,
    plan: ParallelPlan,
    world: World,
    *,
    communicators: Communicators | None,
    fill: Callable[[ModelChunk], None],
    seed: int,
    vocab_rows: int | None = None,
) -> Context:
    """Build this rank's chunks of a model and fill them with weights. Collective over its ranks.

    Args:
        communicators: of the model's plan and ranks, of which this rank must be one; those of a
            released context serve again.
        fill: puts the weights into a freshly built chunk.
        seed: of the process's random states, if this is its first model (the weights' seed is
            ``fill``'s business).
        vocab_rows: as ``build_chunk``'s.
    """
    if world.device.type == "cpu":
        install_cpu_patches()
    assert communicators is not None, "this rank is none of the model's"
    groups = communicators.groups
    chunks = []
    for number in range(plan.virtual_pipeline):
        chunk = build_chunk(
            spec, options, plan, groups, chunk=number, seed=seed, vocab_rows=vocab_rows
        ).to(world.device)
        fill(chunk)
        chunks.append(chunk)
    return Context(
        role=role,
        spec=spec,
        plan=plan,
        groups=groups,
        links=communicators.links,
        chunks=chunks,
        modules=list(chunks),
        dtype=DTYPES[options.dtype],
        device=world.device,
    )


def freeze(context: Context) -> None:
    """Make a context forward-only."""
    for chunk in context.chunks:
        chunk.requires_grad_(False).eval()


@torch.no_grad()
def mix_weights(target: Context, source: Context, share: float) -> None:
    """Make weights ``share`` times the source's and the rest their own; both lie under one plan."""
    for chunk, other in zip(target.chunks, source.chunks, strict=True):
        for weight, other_weight in zip(chunk.parameters(), other.parameters(), strict=True):
            weight.mul_(1.0 - share).add_(other_weight, alpha=share)
        chunk.mark_changed()


def make_trainable(context: Context, config: OptimizerConfig) -> None:
    """Wrap the chunks so that gradients gather in fp32 buffers and are summed over replicas.

    Args:
        config: of the optimizer that is to train them.
    """
    assert context.plan.pipeline == 1 or context.links.backward is not None, "opened to be frozen"
    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=config.use_distributed_optimizer,
        overlap_grad_reduce=config.overlap_grad_reduce,
        check_for_nan_in_grad=False,  # a step with non-finite gradients is skipped, not fatal
    )
    context.modules = [
        DistributedDataParallel(
            chunk.config,
            ddp_config,
            chunk,
            disable_bucketing=number > 0,  # as Megatron: only the first chunk's buckets overlap
            pg_collection=context.groups,
        )
        for number, chunk in enumerate(context.chunks)
    ]
