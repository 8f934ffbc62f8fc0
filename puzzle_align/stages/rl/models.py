"""The models of a sampling job: who is where, and the contexts of those that are on this rank."""

import gc
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from puzzle_align.config.resolve import Job
from puzzle_align.layout.grad_buffer import Buckets
from puzzle_align.layout.job_plan import ContextPlan, JobPlan, Phase, Workload
from puzzle_align.runtime.context import Context
from puzzle_align.runtime.groups.collectives import from_rank_zero, sum_on_host, sum_over_world
from puzzle_align.runtime.groups.communicators import build_communicators
from puzzle_align.runtime.groups.world import World, ranks_near
from puzzle_align.schedules.costs import Costs
from puzzle_align.stages.costs import JobCosts, job_costs
from puzzle_align.stages.rl.shadow import Shadow
from puzzle_align.stages.setup import open_context


@dataclass(frozen=True)
class Models:
    """The job's plan, and this rank's contexts by role and workload.

    Workloads of a role that have one plan share the context: there is one copy of the weights. A
    trained role's other workloads have shadows.
    """

    plan: JobPlan
    contexts: Mapping[tuple[str, Workload], Context]
    shadows: Mapping[tuple[str, Workload], Shadow]
    job_costs: JobCosts

    def of(self, context: ContextPlan) -> Context | None:
        """What this rank holds of a context; None if that is nothing."""
        return self.contexts.get((context.role, context.workload))

    @contextmanager
    def opened(self, context: ContextPlan) -> Iterator[Context | None]:
        """What this rank holds of a context, its shadow opened. Collective over the world."""
        shadow = self.shadows.get((context.role, context.workload))
        if shadow is None:
            yield self.of(context)
        else:
            with shadow.opened() as copy:
                yield copy

    def costs(self, phase: Phase, group: Sequence[ContextPlan]) -> Costs | None:
        """What orders colocated contexts that time-share; None: one after the other."""
        return self.job_costs.of(group) if phase.shares_time(group) else None


def open_models(job: Job, world: World) -> Models:
    """Build every model on its ranks. Collective over the world.

    All are connected before the first is filled, and ranks then wait for one another's weights as
    long as it takes.

    Raises:
        ValueError: for a model or a plan that does not fit.
    """
    config, plan = job.config, job.plan
    costs = job_costs(config)
    for phase in plan.phases[1:]:
        costs.of(phase.contexts)  # what was not measured is told of before models are built
    copies: list[ContextPlan] = []  # one of each role's contexts that are colocated
    for context in plan.contexts:
        if not any(_is_one(context, other) for other in copies):
            copies.append(context)
    uses = [[context for context in plan.contexts if _is_one(context, copy)] for copy in copies]
    own = [
        build_communicators(
            copy.plan, world, copy.ranks, trained=any(use.workload == "train" for use in used)
        )
        for copy, used in zip(copies, uses, strict=True)
    ]
    # Where nodes differ, rank 0's: tables must be alike on all ranks.
    near = from_rank_zero(lambda: ranks_near(world.size))
    contexts: dict[tuple[str, Workload], Context] = {}
    shadows: dict[tuple[str, Workload], Shadow] = {}
    for copy, used, communicators in zip(copies, uses, own, strict=True):  # the trained ones first
        trained = plan.trained.get(copy.role)
        if trained is not None and trained not in used:
            source = contexts.get((trained.role, trained.workload))
            shadow = Shadow(
                trained,
                copy,
                world,
                source,
                communicators,
                seed=config.seed,
                ranks_per_node=near,
                sharded=shards_sent(job, copy.role),
            )
            shadows |= {(use.role, use.workload): shadow for use in used}
        elif communicators is not None:
            built = open_context(job, copy, world, communicators)
            contexts |= {(use.role, use.workload): built for use in used}
    if shadows:
        # A copy's cycles are collected in every iteration: what is here now stays, and need not be
        # looked through for them, which takes a fifth of a second.
        gc.collect()
        gc.freeze()
    _meet(world, bool(shadows))
    return Models(plan, contexts, shadows, costs)


def _meet(world: World, moves_weights: bool) -> None:
    """Have all ranks here before they need one another. Collective over the world.

    Ranks with less to fill than others, or nothing, would run into the groups' time-out. Where
    weights move: on NCCL a group's first batch of transfers needs all of its ranks, some of which
    have none.
    """
    sum_on_host(torch.zeros(1))
    if moves_weights and world.device.type == "cuda":
        sum_over_world(torch.zeros(1, device=world.device))


def shards_sent(job: Job, role: str) -> Buckets | None:
    """The buckets of a role's optimizer, where weights go to a copy from its shards; else None."""
    optimizer = job.optimizer(role)
    early = job.settings.overlap_switch and optimizer.use_distributed_optimizer
    return Buckets(overlapped=optimizer.overlap_grad_reduce) if early else None


def _is_one(context: ContextPlan, other: ContextPlan) -> bool:
    """Whether two contexts can be one copy of the weights."""
    same = context.ranks == other.ranks and context.plan == other.plan
    return context.role == other.role and same
