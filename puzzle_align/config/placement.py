"""Where a job's contexts lie and how they take turns: ranks and plans by role, and ``JobPlan``."""

import math
import re
from dataclasses import replace
from itertools import combinations

from puzzle_align.config.job import JobConfig
from puzzle_align.config.layers import with_layers
from puzzle_align.config.roles import (
    fp8_of,
    phase_roles,
    reference_loss,
    resolve_role_spec,
    role_names,
    role_parallel,
    trained_roles,
)
from puzzle_align.config.sections.models import ParallelConfig, RoleConfig
from puzzle_align.config.stages import STAGES, PhaseRoles
from puzzle_align.files.messages import shown
from puzzle_align.layout.holdings import Holdings
from puzzle_align.layout.job_plan import (
    ContextPlan,
    JobPlan,
    Phase,
    Workload,
    resolve_order,
)
from puzzle_align.layout.model import ModelOptions
from puzzle_align.layout.plan import MOST_RANKS, ParallelPlan
from puzzle_align.layout.rank_order import ordered_ranks

_RANKS = re.compile(r"(\d{1,9})(?:\s*-\s*(\d{1,9}))?")
# What two models have in common that time-share a pipeline.
_SHARED_SIZES = (
    "pipeline_model_parallel_size",
    "tensor_model_parallel_size",
    "virtual_pipeline_model_parallel_size",
    "sequence_parallel",
)


def job_plan(job: JobConfig, options: ModelOptions, world_size: int) -> JobPlan:
    """Who is where in a job on ``world_size`` ranks.

    Args:
        options: how models are computed on the job's device; ``recompute`` is each role's own, and
            some roles' is in FP8.

    Raises:
        ValueError: if a plan does not fit the ranks, or a model is not supported.
    """

    def place(own: PhaseRoles) -> Phase:
        contexts = tuple(
            context_plan(job, role, workload, options, world_size)
            for role, workload in own.contexts
        )
        share = own.placement in ("auto", "time_shared")
        order = resolve_order(contexts, share=share)
        return Phase(name=own.name, order=order, contexts=contexts, once=own.once)

    phases = tuple(map(place, STAGES[job.stage].phases(job)))
    return JobPlan(stage=job.stage, world_size=world_size, phases=phases)


def context_plan(
    job: JobConfig, role: str, workload: Workload, options: ModelOptions, world_size: int
) -> ContextPlan:
    """One context of a job; arguments and errors are ``job_plan``'s."""
    parallel, _ = role_parallel(job, role)
    plan = resolve_role_plan(job, role, world_size)
    ranks = tuple(role_ranks(job, role, world_size))
    if workload == "generate" and has_own_generation(job):
        plan, ranks = _resolve_generation(job, Holdings(resolve_role_spec(job, role), plan, ranks))
    return ContextPlan(
        role=role,
        workload=workload,
        model=resolve_role_spec(job, role),
        options=replace(
            options,
            recompute=parallel.recompute,
            fp8=None if options.fp8 is None else fp8_of(job, role),
        ),
        plan=plan,
        ranks=ranks,
    )


def has_own_generation(job: JobConfig) -> bool:
    """Whether the actor samples under another plan, or on other ranks, than it trains."""
    return job.generation.parallel is not None or job.generation.ranks is not None


def generation_grid(job: JobConfig, world_size: int) -> ParallelPlan:
    """The plan that the actor samples under, without its layers.

    Raises:
        ValueError: if there are not as many ranks as its sizes multiply to.
    """
    parallel, key = generation_parallel(job)
    named, ranks_key = _generation_ranks(job)
    if named is None:
        return resolve_plan(parallel, world_size, key)
    return _plan_on_named(parallel, key, named, ranks_key, world_size, "generation.parallel")


def generation_parallel(job: JobConfig) -> tuple[ParallelConfig, str]:
    """The plan that the actor samples under, and the dotted key of it."""
    if job.generation.parallel is not None:
        return job.generation.parallel, "generation.parallel"
    return role_parallel(job, "actor")


def _generation_ranks(job: JobConfig) -> tuple[range | None, str]:
    """The ranks that the config names for sampling, None for all; and the dotted key."""
    if job.generation.ranks is None:
        return _named_ranks(job, "actor")
    return parse_ranks(job.generation.ranks, "generation.ranks"), "generation.ranks"


def _resolve_generation(job: JobConfig, trained: Holdings) -> tuple[ParallelPlan, tuple[int, ...]]:
    """The plan that the actor samples under, and its ranks: ordered so that few weights move."""
    named, _ = _generation_ranks(job)
    ranks = tuple(named or trained.ranks)
    parallel, _ = generation_parallel(job)
    grid = _plan_on(parallel, len(ranks))
    assert grid is not None, "generation_grid has not been asked"
    # Sampling trains nothing: another schedule alone would not make it another plan.
    grid = replace(grid, schedule=trained.plan.schedule)
    plan = with_layers(grid, job, parallel, trained.model, train=False)
    return plan, ordered_ranks(trained, plan, ranks)


def resolve_role_plan(job: JobConfig, role: str, world_size: int) -> ParallelPlan:
    """A role's plan on its ranks, with its model's layers.

    Raises:
        ValueError: as ``role_grid`` and ``resolve_role_spec``.
    """
    plan = role_grid(job, role, world_size)
    parallel, spec = role_parallel(job, role)[0], resolve_role_spec(job, role)
    return with_layers(plan, job, parallel, spec, train=role in trained_roles(job))


def role_grid(job: JobConfig, role: str, world_size: int) -> ParallelPlan:
    """A role's plan on its ranks, without its layers: no model is looked at.

    Raises:
        ValueError: if there are not as many ranks as its sizes multiply to.
    """
    parallel, key = role_parallel(job, role)
    if STAGES[job.stage].ranks_by_role:
        return _plan_on_named_ranks(job, role, world_size)
    if not runs_concurrently(job):
        return resolve_plan(parallel, world_size, key)
    taken = _least_ranks(role_parallel(job, "reference")[0])
    if role == "reference":  # what the world is too small for is said of the actor
        return resolve_plan(parallel, taken, key)
    return resolve_plan(parallel, world_size - taken, key, taken=taken)


def _plan_on_named_ranks(job: JobConfig, role: str, world_size: int) -> ParallelPlan:
    parallel, plan_key = role_parallel(job, role)
    named, ranks_key = _named_ranks(job, role)
    if named is None:
        return resolve_plan(parallel, world_size, plan_key)
    own_key = f"{role}.parallel"
    return _plan_on_named(parallel, plan_key, named, ranks_key, world_size, own_key)


def _plan_on_named(
    parallel: ParallelConfig,
    plan_key: str,
    named: range,
    ranks_key: str,
    world_size: int,
    own_key: str,
) -> ParallelPlan:
    """The plan on ranks that are named; ``own_key`` is where one for them alone would stand."""
    if named[-1] >= world_size:
        raise ValueError(
            f"{ranks_key}: rank {named[-1]} is not among the job's {world_size} ranks: start more, "
            "or name others"
        )
    plan = _plan_on(parallel, len(named))
    if plan is None:
        cure = "change the sizes" if plan_key == own_key else f"give {own_key}"
        raise ValueError(
            f"{plan_key}: {_sizes(parallel)} does not make the {len(named)} ranks of {ranks_key}: "
            f"name others, or {cure}"
        )
    return plan


def resolve_plan(
    parallel: ParallelConfig, num_ranks: int, key: str, *, taken: int = 0
) -> ParallelPlan:
    """The plan on all of ``num_ranks`` ranks, without its layers; D fills what P and T leave.

    Args:
        key: dotted name of ``parallel``, for errors.
        taken: the job's other ranks, which the reference has, for errors.

    Raises:
        ValueError: if the sizes do not multiply to the number of ranks.
    """
    plan = _plan_on(parallel, num_ranks)
    if plan is None:
        least = _least_ranks(parallel)
        wanted, there = f"{least + taken} ranks", f"{num_ranks} ranks"
        if parallel.data_parallel_size is None:
            wanted = f"a multiple of {least} ranks" + (f" and {taken} more" if taken else "")
        if taken:
            there = f"{max(0, num_ranks)} ranks ({num_ranks + taken}, less the reference's {taken})"
        raise ValueError(
            f"{key}: {_sizes(parallel)} does not make {there}: start {wanted}, or change the sizes"
        )
    return plan


def one_replica(parallel: ParallelConfig) -> ParallelPlan:
    """The plan without its data axis, which cuts nothing and may not fit the world."""
    return ParallelPlan(
        pipeline=parallel.pipeline_model_parallel_size,
        tensor=parallel.tensor_model_parallel_size,
        virtual_pipeline=parallel.virtual_pipeline_model_parallel_size,
        schedule=parallel.pipeline_schedule,
        sequence_parallel=parallel.sequence_parallel,
    )


def _plan_on(parallel: ParallelConfig, num_ranks: int) -> ParallelPlan | None:
    """The plan on all of ``num_ranks`` ranks; None where the sizes do not multiply to them."""
    pipeline, tensor = parallel.pipeline_model_parallel_size, parallel.tensor_model_parallel_size
    data = parallel.data_parallel_size or max(1, num_ranks // (pipeline * tensor))
    if pipeline * data * tensor != num_ranks:
        return None
    return ParallelPlan(
        pipeline=pipeline,
        data=data,
        tensor=tensor,
        virtual_pipeline=parallel.virtual_pipeline_model_parallel_size,
        schedule=parallel.pipeline_schedule,
        sequence_parallel=parallel.sequence_parallel,
    )


def _sizes(parallel: ParallelConfig) -> str:
    pipeline, tensor = parallel.pipeline_model_parallel_size, parallel.tensor_model_parallel_size
    return f"P={pipeline} x D={parallel.data_parallel_size or 'null'} x T={tensor}"


def role_ranks(job: JobConfig, role: str, world_size: int) -> range:
    """The ranks that hold a role: all; in stage ppo, those that the config names; in the
    others, the last for a concurrent reference, the rest for the policy.

    ``world_size`` is one that the roles' plans fit. ValueError as ``parse_ranks``.
    """
    if STAGES[job.stage].ranks_by_role:
        return _named_ranks(job, role)[0] or range(world_size)
    if not runs_concurrently(job):
        return range(world_size)
    split = world_size - _least_ranks(role_parallel(job, "reference")[0])
    return range(split, world_size) if role == "reference" else range(split)


def _named_ranks(job: JobConfig, role: str) -> tuple[range | None, str]:
    """The ranks that the config names for a role, None for all; and the dotted key.

    A model under the actor's plan, without ranks of its own, is where the actor is.
    """
    own: RoleConfig = getattr(job, role)
    if own.ranks is None and own.parallel is None and role != "actor":
        return _named_ranks(job, "actor")
    key = f"{role}.ranks"
    return (None if own.ranks is None else parse_ranks(own.ranks, key)), key


def parse_ranks(text: str, key: str) -> range:
    """The ranks of ``0-3``, or of a single number; ValueError where it is neither."""
    match = _RANKS.fullmatch(text.strip())
    ranks = range(0)
    if match is not None:
        ranks = range(int(match[1]), int(match[2] or match[1]) + 1)
    if not ranks or ranks[-1] >= MOST_RANKS:
        raise ValueError(
            f"{key}: '{shown(text)}' are no ranks; write the first and the last, as in 0-3 (at "
            f"most {MOST_RANKS})"
        )
    return ranks


def idle_ranks(job: JobConfig, world_size: int) -> list[int]:
    """The ranks that hold no model."""
    held = {rank for role in role_names(job) for rank in role_ranks(job, role, world_size)}
    held |= set(_generation_ranks(job)[0] or ())
    return [rank for rank in range(world_size) if rank not in held]


def smallest_world_size(job: JobConfig) -> int:
    """The fewest ranks on which the plans of all roles can lie, as far as there are any."""
    parallels = [role_parallel(job, role)[0] for role in role_names(job)]
    named = [_named_ranks(job, role)[0] for role in role_names(job)]
    if any(own.name == "generate" for own in STAGES[job.stage].phases(job)):
        parallels.append(generation_parallel(job)[0])
        named.append(_generation_ranks(job)[0])
    sizes = [max(1, _least_ranks(parallel)) for parallel in parallels]
    if STAGES[job.stage].ranks_by_role:
        whole = [size for size, ranks in zip(sizes, named, strict=True) if ranks is None]
        last = max((ranks[-1] + 1 for ranks in named if ranks is not None), default=1)
        step = math.lcm(*whole)
        return -(-last // step) * step
    return sum(sizes) if runs_concurrently(job) else math.lcm(*sizes)


def _least_ranks(parallel: ParallelConfig) -> int:
    """Ranks that a plan takes; one replica where their number is left open."""
    replica = parallel.pipeline_model_parallel_size * parallel.tensor_model_parallel_size
    return replica * (parallel.data_parallel_size or 1)


def phase_obstacle(job: JobConfig, phase: str, world_size: int) -> str | None:
    """What keeps any two models of a phase from time-sharing; None if nothing does."""
    roles = phase_roles(job, phase)
    pairs = [pair for pair in combinations(roles, 2) if shares_pipeline(job, *pair, world_size)]
    if not pairs:
        return f"of {', '.join(roles)} no two have the same ranks and the same plan"
    if all(role_grid(job, first, world_size).pipeline == 1 for first, _ in pairs):
        key = role_parallel(job, pairs[0][0])[1]
        return f"{key}.pipeline_model_parallel_size=1 leaves no bubbles"
    return None


def shares_pipeline(job: JobConfig, first: str, second: str, world_size: int) -> bool:
    """Whether two models can time-share: the same ranks, under plans alike but for the layers."""
    ranks = [role_ranks(job, role, world_size) for role in (first, second)]
    grids = [role_grid(job, role, world_size) for role in (first, second)]
    return ranks[0] == ranks[1] and grids[0] == grids[1]


def time_sharing_obstacle(job: JobConfig) -> str | None:
    """What keeps the reference out of the policy's pipeline bubbles; None if nothing does.

    The data axis needs no look: both plans cover the same ranks.
    """
    idle = _idle_reference(job)
    if idle is not None:
        return idle
    policy, policy_key = role_parallel(job, "actor")
    reference, reference_key = role_parallel(job, "reference")
    if policy.pipeline_model_parallel_size == 1:
        return f"{policy_key}.pipeline_model_parallel_size=1 leaves no bubbles"
    for name in _SHARED_SIZES:
        own, wanted = getattr(reference, name), getattr(policy, name)
        if own != wanted:
            return f"{reference_key}.{name}={own} is not the actor's ({wanted})"
    return None


def runs_concurrently(job: JobConfig) -> bool:
    """Whether the reference runs on ranks of its own, beside the policy."""
    return job.placement.reference == "concurrent" and concurrency_obstacle(job) is None


def concurrency_obstacle(job: JobConfig) -> str | None:
    """What keeps the reference from ranks of its own; None if nothing does."""
    if job.reference.parallel is None:
        return _idle_reference(job) or "reference.parallel=null does not say how many ranks it gets"
    return _idle_reference(job)


def _idle_reference(job: JobConfig) -> str | None:
    """Why no reference runs while the policy trains; None if it does."""
    phases = STAGES[job.stage].phases(job)
    working = {role: phase for phase in phases for role, _ in phase.contexts}.get("reference")
    if working is None:
        return f"the loss of stage {job.stage} uses no reference"
    if working.once:
        section = STAGES[job.stage].loss
        return f"{section}.precompute_ref_log_probs=true runs the reference before training"
    loss = reference_loss(job)
    assert loss is not None, "of what other loss has a reference"
    return loss.sequence_reason
