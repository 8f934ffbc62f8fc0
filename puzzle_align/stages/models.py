"""Models of a job on this rank: built, loaded, and opened phase by phase."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from puzzle_align.config.resolve import Job
from puzzle_align.layout.job_plan import ContextPlan, Workload
from puzzle_align.layout.model import without_adapters
from puzzle_align.models.chunk import ModelChunk
from puzzle_align.models.shards import Shards
from puzzle_align.runtime.checkpoint.models import Trained
from puzzle_align.runtime.context import Context, build_context, build_copy, freeze, make_trainable
from puzzle_align.runtime.groups.collectives import sum_over_world, wait_for_all
from puzzle_align.runtime.groups.world import Communicators, World, build_communicators
from puzzle_align.runtime.merged import Merged
from puzzle_align.runtime.optimizer.optimizer import Optimizer
from puzzle_align.runtime.shadow import Shadow
from puzzle_align.stages.weights import Weights, role_weights


def open_context(
    weights: Weights,
    planned: ContextPlan,
    world: World,
    communicators: Communicators | None = None,
    lender: Context | None = None,
) -> Context:
    """Build a role's model and fill it with its weights. Collective over its ranks.

    Args:
        communicators: made beforehand; None: this call makes them, on all ranks.
        lender: another model in whose memory the base is.
    """

    def fill(chunk: ModelChunk) -> None:
        own = Shards([chunk], planned.model)
        lent = Shards(lender.chunks, lender.spec).lend(own) if lender else ()
        weights.fill(chunk, lent)

    if communicators is None:
        communicators = build_communicators(
            planned.plan, world, planned.ranks, trained=planned.workload == "train"
        )
    return build_context(
        planned.role,
        planned.model,
        planned.options,
        planned.plan,
        world,
        communicators=communicators,
        fill=fill,
        has_memory=lender is None,
    )


@dataclass(frozen=True)
class Models:
    """This rank's contexts and shadows, by role and workload, and optimizers of trained roles.

    Workloads of a role with the same plan share a context, with one copy of the weights. A trained
    role's workloads under other plans have shadows, and so has sampling with merged adapters.
    """

    contexts: Mapping[tuple[str, Workload], Context]
    shadows: Mapping[tuple[str, Workload], Shadow | Merged]
    optimizers: Mapping[str, Optimizer]

    @property
    def trained(self) -> dict[str, Trained]:
        """Models with optimizers, by role."""
        return {
            role: Trained(self.contexts[role, "train"], optimizer)
            for role, optimizer in self.optimizers.items()
        }

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


def open_models(job: Job, world: World) -> Models:
    """Build the models of a job's iterations, with optimizers. Collective over the world.

    All process groups are connected before the first weights are loaded; then ranks wait for one
    another's loading without a time-out.

    Raises:
        ValueError: for a model or a plan that does not fit.
    """
    plan = job.plan
    staying = [c for phase in plan.phases if not phase.once for c in phase.contexts]
    planned = [context for context in plan.contexts if context in staying]  # trained ones first
    uses: dict[tuple[object, ...], list[ContextPlan]] = {}  # contexts that share weights
    for context in planned:
        uses.setdefault((context.role, context.ranks, context.plan), []).append(context)
    communicators = [
        build_communicators(
            used[0].plan, world, used[0].ranks, trained=any(c.workload == "train" for c in used)
        )
        for used in uses.values()
    ]
    contexts: dict[tuple[str, Workload], Context] = {}
    shadows: dict[tuple[str, Workload], Shadow | Merged] = {}
    for used, links in zip(uses.values(), communicators, strict=True):
        copy, trained = used[0], plan.trained.get(used[0].role)
        if trained is not None and trained not in used:
            shadow = Shadow(
                trained,
                copy,
                world,
                contexts.get((trained.role, trained.workload)),
                links,
                ranks_per_node=job.engine.ranks_per_node,  # rank 0's: tables are equal everywhere
                sharded=job.shards_sent(copy.role),
            )
            shadows |= {(use.role, use.workload): shadow for use in used}
        elif links is not None:
            weights, lender = role_weights(job.models[copy.role], job.config), plan.lender(copy)
            base = None if lender is None else contexts[lender.role, lender.workload]
            built = open_context(weights, copy, world, links, base)
            contexts |= {(use.role, use.workload): built for use in used}
            if copy.role in job.settings.merged and (copy.role, "generate") in contexts:
                plain = build_copy(copy, without_adapters(copy.model), world, links)
                shadows[copy.role, "generate"] = Merged(built, plain)
    # Ranks with less to load would otherwise run into the groups' time-out.
    wait_for_all(world.device)
    if plan.switches and world.device.type == "cuda":
        # An NCCL group's first batch of transfers needs all ranks: a collective comes before.
        sum_over_world(torch.zeros(1, device=world.device))
    return Models(contexts, shadows, _open_optimizers(job, contexts))


def _open_optimizers(
    job: Job, contexts: Mapping[tuple[str, Workload], Context]
) -> dict[str, Optimizer]:
    """Make trained models trainable, freeze the others. Collective over each model's ranks."""
    for (role, _), context in contexts.items():
        if role not in job.plan.trained:
            freeze(context)
    optimizers: dict[str, Optimizer] = {}
    for role in job.plan.trained:
        context = contexts.get((role, "train"))
        if context is not None:
            options = job.optimizer(role)
            make_trainable(context, options)
            optimizers[role] = Optimizer(context, options)
    return optimizers
