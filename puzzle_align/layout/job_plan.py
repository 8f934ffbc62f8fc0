"""The plan of a job: its models' contexts on ranks, by the phases of one iteration.

A context is a role's model under one workload and one parallel plan, on a set of ranks. A
``JobPlan`` comes from a job's config or a planner's ``plan.json``; runtime, validation, memory
estimates, predictions and traces read it.

Invariants (the tests assert them):
- a role has one context in a phase, and one for each of its workloads in the job; all contexts of a
  role have the same model;
- contexts are colocated if they have the same ranks and plans that differ only in the layers at
  each position; contexts that share ranks without being colocated run one after the other;
- a plan survives the round trip through JSON (``files.typed``).
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

from puzzle_align.files.messages import shown
from puzzle_align.layout.model import ModelOptions, ModelSpec
from puzzle_align.layout.plan import MOST_RANKS, ParallelPlan, Topology
from puzzle_align.schedules.registry import schedule_problem

Placed = tuple[ParallelPlan, tuple[int, ...]]  # a plan and its ranks
Workload = Literal["generate", "infer", "train"]
# How the contexts of a phase take turns:
# - sequential: one after the other;
# - time_shared: colocated ones fill the bubbles of each other's pipeline;
# - concurrent: in parallel, on separate ranks.
Order = Literal["sequential", "time_shared", "concurrent"]


@dataclass(frozen=True, kw_only=True)
class ContextPlan:
    """A role's model under one workload and one plan, on global ranks in the plan's order."""

    role: str
    workload: Workload
    model: ModelSpec
    options: ModelOptions
    plan: ParallelPlan
    ranks: tuple[int, ...]
    base: str | None = None  # name of the frozen weights, without heads and adapters; None: trained

    @cached_property
    def topology(self) -> Topology:
        """Topology of the plan on its ranks. ValueError if their numbers differ."""
        return Topology(self.plan, self.ranks)

    @property
    def placed(self) -> Placed:
        """The plan and its ranks."""
        return self.plan, self.ranks

    @property
    def parts(self) -> tuple[int, ...]:
        """First global rank of each pipeline rank."""
        return self.ranks[:: self.plan.data * self.plan.tensor]

    def ranks_of(self, part: int) -> tuple[int, ...]:
        """Global ranks of a pipeline rank."""
        size = self.plan.data * self.plan.tensor
        return self.ranks[part * size : (part + 1) * size]

    def part(self, rank: int) -> int | None:
        """The pipeline rank of a global rank; None if it is not in the context."""
        if rank not in self.ranks:
            return None
        return self.ranks.index(rank) // (self.plan.data * self.plan.tensor)

    def output_rank(self, data_rank: int) -> int:
        """The global rank that has the outputs of replica ``data_rank``."""
        return self.topology.rank(self.plan.pipeline - 1, data_rank, 0)

    def is_colocated(self, other: "ContextPlan") -> bool:
        """Whether both have the same ranks and equal plans but for the layers: can time-share."""
        return self.ranks == other.ranks and self.plan.grid == other.plan.grid


@dataclass(frozen=True, kw_only=True)
class Phase:
    """The contexts of one part of an iteration, in order.

    If a phase has trained and frozen contexts, the losses read the frozen ones' outputs for the
    same rows: these run before the trained ones, or, unless ``order`` is sequential, a batch ahead.
    """

    name: str
    order: Order
    contexts: tuple[ContextPlan, ...]
    once: bool = False  # runs before the first iteration, and then frees its models

    @property
    def roles(self) -> tuple[str, ...]:
        """Roles of the contexts, in order."""
        return tuple(context.role for context in self.contexts)

    def context(self, role: str) -> ContextPlan:
        """Look up a role's context in this phase."""
        return next(context for context in self.contexts if context.role == role)

    @property
    def trained(self) -> tuple[ContextPlan, ...]:
        """The trained contexts."""
        return tuple(c for c in self.contexts if c.workload == "train")

    @property
    def is_fed(self) -> bool:
        """Whether trained contexts read outputs of this phase's frozen ones for the same rows."""
        return 0 < len(self.trained) < len(self.contexts)

    @cached_property
    def colocated(self) -> tuple[tuple[ContextPlan, ...], ...]:
        """The contexts in order, grouped by colocation."""
        return tuple(tuple(group) for group in _colocated(self.contexts))

    def shares_time(self, group: Sequence[ContextPlan]) -> bool:
        """Whether colocated contexts fill each other's bubbles in this phase."""
        return self.order == "time_shared" and _has_bubbles_to_share(group)

    @cached_property
    def lanes(self) -> tuple[int, ...]:
        """First rank of every set of ranks that hold the same parts of the same models.

        A picture has a line for each; under a single plan, lanes are pipeline ranks.
        """
        return tuple(ranks[0] for ranks in sets_of_ranks(self.contexts))

    @property
    def lane_names(self) -> tuple[str, ...]:
        """Names of the lanes: pipeline ranks if they agree in all trained models (in all models, if
        none is trained), else first ranks.
        """
        if all(self.lanes == context.parts for context in self.trained or self.contexts):
            return tuple(f"P{number}" for number in range(len(self.lanes)))
        return tuple(f"rank {rank}" for rank in self.lanes)


@dataclass(frozen=True, kw_only=True)
class JobPlan:
    """Plan of a job on ``world_size`` ranks; ``phases`` are in the order of an iteration."""

    stage: str
    world_size: int
    phases: tuple[Phase, ...]

    def phase(self, name: str) -> Phase:
        """Look up a phase."""
        return next(phase for phase in self.phases if phase.name == name)

    @cached_property
    def contexts(self) -> tuple[ContextPlan, ...]:
        """All contexts: trained ones first, then in order of phases."""
        contexts = [context for phase in self.phases for context in phase.contexts]
        return tuple(sorted(contexts, key=lambda context: context.workload != "train"))

    def context(self, role: str, workload: Workload) -> ContextPlan:
        """Look up a role's context under a workload."""
        return next(c for c in self.contexts if (c.role, c.workload) == (role, workload))

    @property
    def switches(self) -> bool:
        """Whether a model samples under another plan, or on other ranks, than in ``models``."""
        sampling = (c for c in self.contexts if c.workload == "generate")
        return any(context.placed != self.models[context.role].placed for context in sampling)

    @cached_property
    def models(self) -> dict[str, ContextPlan]:
        """Context that keeps a role's weights, by role: the trained one, else the first."""
        kept: dict[str, ContextPlan] = {}
        for context in self.contexts:
            kept.setdefault(context.role, context)
        return kept

    @cached_property
    def residents(self) -> dict[str, ContextPlan]:
        """The ``models`` that take part in every iteration."""
        staying = {c.role for phase in self.phases if not phase.once for c in phase.contexts}
        return {role: context for role, context in self.models.items() if role in staying}

    def lender(self, context: ContextPlan) -> ContextPlan | None:
        """The resident model in whose memory a ``models`` context's base is; None: its own."""
        is_there = self.residents.get(context.role) is context
        return lender(context, self.residents.values()) if is_there else None

    @cached_property
    def trained(self) -> dict[str, ContextPlan]:
        """The trained contexts, by role, the stage's main one (policy, reward model) first."""
        return {c.role: c for c in self.contexts if c.workload == "train"}


@dataclass(frozen=True, kw_only=True)
class OptimizerStates:
    """Trained roles by traits of their optimizer state: sharded, in bf16, in host memory."""

    sharded: tuple[str, ...] = ()
    small: tuple[str, ...] = ()
    on_host: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings beside the plan that affect a job's times and memory, such as row lengths."""

    row_tokens: int
    optimizers: OptimizerStates = field(default_factory=OptimizerStates)
    prefill_tokens: int = 4096
    decode_batch_size: int = 64
    overlap_switch: bool = False
    set_aside: tuple[str, ...] = ()  # parts of trained models that are offloaded during sampling
    merged: tuple[str, ...] = ()  # roles that sample with merged adapters, if in their own plan


def resolve_order(contexts: Sequence[ContextPlan], *, share: bool) -> Order:
    """Decide the order of a phase's contexts; ``share`` allows time-sharing if it is possible."""
    if share and any(_has_bubbles_to_share(group) for group in _colocated(contexts)):
        return "time_shared"
    ranks = [rank for context in contexts for rank in context.ranks]
    apart = len(contexts) > 1 and len(ranks) == len(set(ranks))
    return "concurrent" if apart else "sequential"


def sharing_obstacle(contexts: Sequence[ContextPlan]) -> str | None:
    """Reason why contexts cannot fill each other's bubbles; None if they can."""
    groups = [group for group in _colocated(contexts) if len(group) > 1]
    if any(_has_bubbles_to_share(group) for group in groups):
        return None
    if not groups:
        plans = ", ".join(f"{context.role} {context.plan.grid}" for context in contexts)
        return f"no two models have the same ranks and the same plan: {plans}"
    return f"{groups[0][0].role} {groups[0][0].plan.grid}: one pipeline rank leaves no bubbles"


def sets_of_ranks(contexts: Sequence[ContextPlan]) -> list[tuple[int, ...]]:
    """Group the ranks that hold the same parts of the same contexts; in order of first ranks.

    Ranks outside all contexts are in no group.
    """
    parts: dict[int, list[int | None]] = {}  # by rank and context
    for number, context in enumerate(contexts):
        size = context.plan.data * context.plan.tensor
        for place, rank in enumerate(context.ranks):
            parts.setdefault(rank, [None] * len(contexts))[number] = place // size
    held: dict[tuple[int | None, ...], list[int]] = {}
    for rank in sorted(parts):
        held.setdefault(tuple(parts[rank]), []).append(rank)
    return [tuple(ranks) for ranks in held.values()]


def lender(context: ContextPlan, models: Iterable[ContextPlan]) -> ContextPlan | None:
    """The first of ``models`` that has a context's base, in one precision, under one plan.

    None: it is the context itself.
    """

    def traits(of: ContextPlan) -> tuple[object, ...]:
        return of.base, of.options.dtype, *of.placed

    if context.base is None:
        return None
    first = next(model for model in models if traits(model) == traits(context))
    return None if first is context else first


def _colocated(contexts: Sequence[ContextPlan]) -> Iterator[list[ContextPlan]]:
    remaining = list(contexts)
    while remaining:
        group = [context for context in remaining if context.is_colocated(remaining[0])]
        remaining = [context for context in remaining if context not in group]
        yield group


def _has_bubbles_to_share(group: Sequence[ContextPlan]) -> bool:
    return len(group) > 1 and group[0].plan.pipeline > 1


def check_job_plan(plan: JobPlan, where: str) -> None:
    """Raise ValueError, a line beginning with ``where``, if a plan from a file is inconsistent."""
    if not 1 <= plan.world_size <= MOST_RANKS:
        raise ValueError(
            f"{where}: world_size={plan.world_size} is not a number of ranks; make it again"
        )
    if not plan.phases:
        raise ValueError(f"{where}: it has no phases; make it again")
    for phase in plan.phases:
        if not phase.contexts or len(set(phase.roles)) != len(phase.roles):
            raise ValueError(
                f"{where}: phase {shown(phase.name)} has the roles {shown(list(phase.roles))}: "
                "each must be there once, and one at least; make it again"
            )
        for context in phase.contexts:
            _check_context(context, plan.world_size, f"{where}: the {shown(context.role)}'s")


def _check_context(context: ContextPlan, world_size: int, whose: str) -> None:
    plan, ranks = context.plan, context.ranks
    for name, value in vars(plan).items():
        numbers = value if isinstance(value, tuple) else (value,)
        if any(type(number) is int and number < 1 for number in numbers):
            raise ValueError(f"{whose} plan has {name}={shown(value)}; make it again")
    if schedule_problem(plan.schedule, plan.virtual_pipeline):
        raise ValueError(f"{whose} plan has schedule={shown(plan.schedule)}; make it again")
    in_world, needed = set(ranks) <= set(range(world_size)), plan.world_size
    if not in_world or len(set(ranks)) != len(ranks) or len(ranks) != needed:
        raise ValueError(
            f"{whose} ranks {shown(list(ranks))} are not {needed} different ones of the "
            f"{world_size}; make it again"
        )
