"""Models of a job on this rank: built, loaded, and opened phase by phase."""

import gc
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from puzzle_align.config.resolve import Job
from puzzle_align.layout.grad_buffer import Buckets
from puzzle_align.layout.job_plan import ContextPlan, Workload
from puzzle_align.runtime.context import Context, freeze, make_trainable
from puzzle_align.runtime.groups.collectives import from_rank_zero, sum_over_world, wait_for_all
from puzzle_align.runtime.groups.world import World, build_communicators, ranks_near
from puzzle_align.runtime.optimizer.optimizer import Optimizer
from puzzle_align.runtime.shadow import Shadow
from puzzle_align.stages.setup import open_context


@dataclass(frozen=True)
class Models:
    """This rank's contexts, by role and workload, and the optimizers of the trained ones.

    Workloads of a role with the same plan share a context, with one copy of the weights. A trained
    role's workloads under other plans have shadows.
    """

    contexts: Mapping[tuple[str, Workload], Context]
    shadows: Mapping[tuple[str, Workload], Shadow]
    optimizers: dict[str, Optimizer] = field(default_factory=dict)

    @contextmanager
    def opened(self, planned: ContextPlan) -> Iterator[Context | None]:
        """Yield this rank's part of a context, with its shadow open. Collective over the world."""
        key = (planned.role, planned.workload)
        shadow = self.shadows.get(key)
        if shadow is None:
            yield self.contexts.get(key)
        else:
            with shadow.opened() as copy:
                yield copy

    def train(self, job: Job) -> None:
        """Make trained models trainable, freeze the others. Collective over each model's ranks."""
        for (role, _), context in self.contexts.items():
            if role not in job.plan.trained:
                freeze(context)
        for role in job.plan.trained:
            context = self.contexts.get((role, "train"))
            if context is not None:
                options = job.optimizer(role)
                make_trainable(context, options)
                self.optimizers[role] = Optimizer(context, options)


def open_models(job: Job, world: World) -> Models:
    """Build the models that stay for the whole job, on their ranks. Collective over the world.

    All process groups are connected before the first weights are loaded; then ranks wait for one
    another's loading without a time-out.

    Raises:
        ValueError: for a model or a plan that does not fit.
    """
    plan = job.plan
    staying = [c for phase in plan.phases if not phase.once for c in phase.contexts]
    planned = [context for context in plan.contexts if context in staying]  # trained ones first
    copies: list[ContextPlan] = []  # one for each set of a role's contexts that share weights
    for context in planned:
        if not any(_share_weights(context, copy) for copy in copies):
            copies.append(context)
    uses = [[context for context in planned if _share_weights(context, copy)] for copy in copies]
    communicators = [
        build_communicators(
            copy.plan, world, copy.ranks, trained=any(use.workload == "train" for use in used)
        )
        for copy, used in zip(copies, uses, strict=True)
    ]
    # Rank 0's, if nodes differ: routing tables must be equal on all ranks.
    near = from_rank_zero(lambda: ranks_near(world.size))
    contexts: dict[tuple[str, Workload], Context] = {}
    shadows: dict[tuple[str, Workload], Shadow] = {}
    for copy, used, links in zip(copies, uses, communicators, strict=True):
        trained = plan.trained.get(copy.role)
        if trained is not None and trained not in used:
            shadow = Shadow(
                trained,
                copy,
                world,
                contexts.get((trained.role, trained.workload)),
                links,
                seed=job.config.seed,
                ranks_per_node=near,
                sharded=shards_sent(job, copy.role),
            )
            shadows |= {(use.role, use.workload): shadow for use in used}
        elif links is not None:
            built = open_context(job, copy, world, links)
            contexts |= {(use.role, use.workload): built for use in used}
    if shadows:
        # A copy's reference cycles are collected in every iteration. Present objects stay: freezing
        # them saves a scan of a fifth of a second each time.
        gc.collect()
        gc.freeze()
    _meet(world, bool(shadows))
    return Models(contexts, shadows)


def _meet(world: World, moves_weights: bool) -> None:
    """Wait until all ranks have loaded their weights. Collective over the world.

    Ranks with less to load would otherwise run into the groups' time-out. If weights move between
    plans: an NCCL group's first batch of transfers needs all ranks, also those without a transfer.
    """
    wait_for_all(world.device)
    if moves_weights and world.device.type == "cuda":
        sum_over_world(torch.zeros(1, device=world.device))


def shards_sent(job: Job, role: str) -> Buckets | None:
    """Buckets of a role's optimizer if weights are sent from its shards to a copy; else None."""
    optimizer = job.optimizer(role)
    early = job.settings.overlap_switch and optimizer.use_distributed_optimizer
    return Buckets(overlapped=optimizer.overlap_grad_reduce) if early else None


def _share_weights(context: ContextPlan, other: ContextPlan) -> bool:
    """Whether two contexts can share one copy of the weights."""
    same = context.ranks == other.ranks and context.plan == other.plan
    return context.role == other.role and same
