"""The models of a job on this rank: built on their ranks, filled, and opened phase by phase."""

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
from puzzle_align.runtime.groups.communicators import build_communicators
from puzzle_align.runtime.groups.world import World, ranks_near
from puzzle_align.runtime.optimizer.optimizer import Optimizer
from puzzle_align.runtime.shadow import Shadow
from puzzle_align.stages.setup import open_context


@dataclass(frozen=True)
class Models:
    """This rank's contexts, by role and workload, and the optimizers of the trained ones.

    Workloads of a role that have one plan share the context: there is one copy of the weights. A
    trained role's other workloads have shadows.
    """

    contexts: Mapping[tuple[str, Workload], Context]
    shadows: Mapping[tuple[str, Workload], Shadow]
    optimizers: dict[str, Optimizer] = field(default_factory=dict)

    @contextmanager
    def opened(self, planned: ContextPlan) -> Iterator[Context | None]:
        """What this rank holds of a context, its shadow opened. Collective over the world."""
        key = (planned.role, planned.workload)
        shadow = self.shadows.get(key)
        if shadow is None:
            yield self.contexts.get(key)
        else:
            with shadow.opened() as copy:
                yield copy

    def train(self, job: Job) -> None:
        """Make the trained models trainable and all others frozen. Collective over each's ranks."""
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
    """Build every model that stays for the job, on its ranks. Collective over the world.

    All are connected before the first is filled, and ranks then wait for one another's weights as
    long as it takes.

    Raises:
        ValueError: for a model or a plan that does not fit.
    """
    plan = job.plan
    staying = [c for phase in plan.phases if not phase.once for c in phase.contexts]
    planned = [context for context in plan.contexts if context in staying]  # the trained ones first
    copies: list[ContextPlan] = []  # one of each role's contexts that are colocated
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
    # Where nodes differ, rank 0's: tables must be alike on all ranks.
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
        # A copy's cycles are collected in every iteration: what is here now stays, and need not be
        # looked through for them, which takes a fifth of a second.
        gc.collect()
        gc.freeze()
    _meet(world, bool(shadows))
    return Models(contexts, shadows)


def _meet(world: World, moves_weights: bool) -> None:
    """Have all ranks here before they need one another. Collective over the world.

    Ranks with less to fill than others, or nothing, would run into the groups' time-out. Where
    weights move: on NCCL a group's first batch of transfers needs all of its ranks, some of which
    have none.
    """
    wait_for_all(world.device)
    if moves_weights and world.device.type == "cuda":
        sum_over_world(torch.zeros(1, device=world.device))


def shards_sent(job: Job, role: str) -> Buckets | None:
    """The buckets of a role's optimizer, where weights go to a copy from its shards; else None."""
    optimizer = job.optimizer(role)
    early = job.settings.overlap_switch and optimizer.use_distributed_optimizer
    return Buckets(overlapped=optimizer.overlap_grad_reduce) if early else None


def _share_weights(context: ContextPlan, other: ContextPlan) -> bool:
    """Whether two contexts can be one copy of the weights."""
    same = context.ranks == other.ranks and context.plan == other.plan
    return context.role == other.role and same
