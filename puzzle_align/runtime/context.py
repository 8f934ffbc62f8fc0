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
from puzzle_align.layout.groups import BACKWARD
from puzzle_align.layout.job_plan import ContextPlan
from puzzle_align.layout.model import ModelOptions, ModelSpec
from puzzle_align.layout.plan import ParallelPlan
from puzzle_align.layout.weights import is_trained
from puzzle_align.models.chunk import ModelChunk, build_chunk
from puzzle_align.models.cpu import install_cpu_patches
from puzzle_align.models.inputs import DTYPES
from puzzle_align.runtime.groups.world import Communicators, PipelineLinks, World


@dataclass
class Context:
    """A placed model: its chunks on this rank and their process groups.

    ``modules`` run the forwards: the chunks, or their gradient-reducing wrappers.
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
    def statistics(self) -> bool:
        """Whether outputs include ``algos.logprobs.STATISTICS``."""
        return self.chunks[-1].statistics

    @property
    def precision(self) -> str:
        """Precision of the weights, as named in configs."""
        return next(name for name, dtype in DTYPES.items() if dtype is self.dtype)

    @property
    def pipeline_rank(self) -> int:
        """Position of this rank in the pipeline."""
        return self.groups.pp.rank()

    @property
    def data_rank(self) -> int:
        """Index of this rank's replica."""
        return self.groups.dp.rank()

    @property
    def is_output_rank(self) -> bool:
        """Whether this rank holds its replica's output: tensor rank 0, last pipeline rank."""
        return self.groups.tp.rank() == 0 and self.pipeline_rank == self.plan.pipeline - 1

    def sum_over_ranks(self, values: torch.Tensor) -> torch.Tensor:
        """Sum ``values`` (any shape) over this context's ranks, in place. Collective over them."""
        dist.all_reduce(values, group=self.groups.intra_dist_opt)
        return values

    @property
    def wrappers(self) -> list[DistributedDataParallel]:
        """Gradient-reducing modules of a trainable context."""
        assert all(isinstance(module, DistributedDataParallel) for module in self.modules)
        return cast(list[DistributedDataParallel], self.modules)

    def release(self) -> None:
        """Free the weights, the gradient buffers and their wrappers; the groups stay.

        An optimizer also holds the weights: its owner must drop it first.
        """
        self.modules = []
        self.chunks = []
        gc.collect()  # a wrapper and the hooks on its parameters form a cycle

    def activation_shape(self, num_tokens: int) -> tuple[int, int, int]:
        """Shape of the activations on a pipeline edge for a row of ``num_tokens``."""
        return num_tokens // self.plan.sequence_shards, 1, self.spec.hidden_size


def build_context(
    role: str,
    spec: ModelSpec,
    options: ModelOptions,
    plan: ParallelPlan,
    world: World,
    *,
    communicators: Communicators | None,
    fill: Callable[[ModelChunk], None],
    vocab_rows: int | None = None,
    has_memory: bool = True,
) -> Context:
    """Build this rank's chunks of a model and fill them with weights. Collective over its ranks.

    Args:
        communicators: groups of the model's plan and ranks, which include this rank; a released
            context's can be used again.
        fill: loads weights into a new chunk.
        vocab_rows, has_memory: passed to ``build_chunk``.
    """
    if world.device.type == "cpu":
        install_cpu_patches()
    assert communicators is not None, "this rank is not one of the model's"
    groups = communicators.groups
    chunks = []
    for number in range(plan.virtual_pipeline):
        chunk = build_chunk(
            spec,
            options,
            plan,
            groups,
            chunk=number,
            vocab_rows=vocab_rows,
            has_memory=has_memory,
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


def build_copy(
    planned: ContextPlan, spec: ModelSpec, world: World, communicators: Communicators
) -> Context:
    """Build a frozen copy of a model, without memory for its weights. Collective over its ranks.

    ``Shards`` gives it memory while it is used, and ``free_copy`` takes it back.

    Args:
        planned: context of the copy, a model of dimensions ``spec``.
    """
    copy = build_context(
        planned.role,
        spec,
        planned.options,
        planned.plan,
        world,
        communicators=communicators,
        fill=lambda _chunk: None,
        has_memory=False,
    )
    freeze(copy)
    return copy


def free_copy(copy: Context) -> None:
    """Free the memory of a copy's weights; beside adapters the base keeps its own."""
    for chunk in copy.chunks:
        for name, parameter in chunk.named_parameters():
            if is_trained(copy.spec, name):
                parameter.data = parameter.new_empty(0)


def freeze(context: Context) -> None:
    """Make a context forward-only."""
    for chunk in context.chunks:
        chunk.requires_grad_(False)


@torch.no_grad()
def mix_weights(target: Context, source: Context, share: float) -> None:
    """Set the target's weights to ``share * source + (1 - share) * target``, under one plan."""
    for chunk, other in zip(target.chunks, source.chunks, strict=True):
        for weight, other_weight in zip(chunk.parameters(), other.parameters(), strict=True):
            weight.mul_(1.0 - share).add_(other_weight, alpha=share)
        chunk.mark_changed()


def make_trainable(context: Context, config: OptimizerConfig) -> None:
    """Wrap the chunks to accumulate gradients in fp32 buffers and sum them over replicas.

    The base of a model with adapters is frozen, and gets no buffers.
    """
    assert context.plan.pipeline == 1 or BACKWARD in context.links.groups, "built as a frozen model"
    for chunk in context.chunks:
        for name, parameter in chunk.named_parameters():
            parameter.requires_grad_(is_trained(context.spec, name))
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
            disable_bucketing=number > 0,  # as in Megatron: only the first chunk's buckets overlap
            pg_collection=context.groups,
        )
        for number, chunk in enumerate(context.chunks)
    ]
