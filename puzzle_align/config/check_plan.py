"""Checks of plans, from the config or a plan file, against models, rows and ranks."""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import fields, replace
from typing import Any

from puzzle_align.config.chosen_plan import ChosenPlan, decided_keys
from puzzle_align.config.job import JobConfig
from puzzle_align.config.parallel import one_replica
from puzzle_align.config.resolution import Resolution
from puzzle_align.config.roles import PhaseRoles, fp8_of, role_model
from puzzle_align.config.schema import is_among
from puzzle_align.config.stages import STAGES
from puzzle_align.files.messages import shown
from puzzle_align.layout.job_plan import (
    ContextPlan,
    JobPlan,
    Phase,
    Workload,
    resolve_order,
    sharing_obstacle,
)
from puzzle_align.layout.model import FP8_MULTIPLES
from puzzle_align.layout.plan import ParallelPlan, division_problems, plan_problems

_AGAIN = "plan this job again"


def place_problems(
    resolution: Resolution, role: str, workload: Workload = "train"
) -> Iterator[str]:
    """Problems of a context's sizes and ranks; inherited sizes repeat the lines of their role."""
    config, place = resolution.config, resolution.place(role, workload)
    key, plan = place.key, one_replica(place.parallel)
    if key.startswith((role, "generation")) or getattr(config, role).ranks is not None:
        try:
            resolution.grid(role, workload)
        except ValueError as error:
            yield str(error)
    yield from plan_problems(plan, key)
    yield from _row_problems(plan, config.packing.row_tokens, key)
    if workload == "train" and fp8_of(config, role) is not None:
        yield from _fp8_problems(resolution, role, plan, key)
    with suppress(ValueError):  # reported with the model
        spec = resolution.model(role).spec
        layered = resolution.with_layers(plan, role, workload)
        yield from division_problems(spec, layered, key, role_model(config, role)[1])


def sharing_problems(resolution: Resolution) -> Iterator[str]:
    """Phases that are configured as time-shared but cannot be."""
    for wanted, phase in zip(resolution.phases, resolution.plan.phases, strict=True):
        obstacle = sharing_obstacle(phase.contexts)
        if wanted.placement == "time_shared" and obstacle is not None:
            yield f"{wanted.key}: time_shared, but {obstacle}; change that, or set it to auto"


def chosen_problems(resolution: Resolution, chosen: ChosenPlan) -> Iterator[str]:
    """Reasons why a job cannot run under a chosen plan, a line each."""
    if len(resolution.models) < len(resolution.roles):
        return
    where, row_tokens = chosen.source, chosen.settings.row_tokens
    for line in _misfits(resolution, chosen):
        yield f"{where}: {line}"
    for context in chosen.plan.contexts:
        if context.role not in resolution.models:
            continue
        key = f"{where}: the {context.role}'s plan ({context.workload})"
        model = resolution.models[context.role]
        yield from plan_problems(context.plan, key)
        yield from _row_problems(context.plan, row_tokens, key)
        yield from division_problems(model.spec, context.plan, key, model.key)
        if context.options.fp8 is not None:
            yield from _fp8_problems(resolution, context.role, context.plan, key)
        if not resolution.engine.orders_ranks and list(context.ranks) != sorted(context.ranks):
            yield f"{key}: its ranks do not ascend; install torch 2.12, or sort them"


def with_source(lines: Sequence[str], chosen: ChosenPlan) -> list[str]:
    """The lines, prefixed by the plan's file where the plan decides the line's key."""
    keys = decided_keys(chosen.plan.stage, chosen.plan.models)
    return [
        f"{chosen.source}: {line}" if is_among(line.partition(":")[0], keys) else line
        for line in lines
    ]


def _misfits(resolution: Resolution, chosen: ChosenPlan) -> Iterator[str]:
    """Differences between the plan and the job, and impossible execution orders and ranks."""
    config, plan = resolution.config, chosen.plan
    planned = [_work(p, [(c.role, c.workload) for c in p.contexts]) for p in plan.phases]
    wanted = [_work(phase, phase.contexts) for phase in resolution.phases]
    if planned != wanted:
        others = [work for work in planned if work not in wanted] or planned
        instead = [work for work in wanted if work not in planned] or wanted
        yield f"it has {shown(', '.join(others))}, and this job {', '.join(instead)}: {_AGAIN}"
        return
    options = resolution.engine.options
    reported: set[str] = set()  # roles may share a model or an option: report it once
    for context in plan.contexts:
        model = resolution.models[context.role]
        other = _first_difference(context.model, model.spec)
        if other is not None and model.key not in reported:
            reported.add(model.key)
            yield (
                f"the {context.role}'s model has {other[1]}, and in this job ({model.key}) "
                f"{other[2]}"
            )
        computed = replace(
            options,
            recompute=context.options.recompute,
            fp8=None if options.fp8 is None else fp8_of(config, context.role),
        )
        other = _first_difference(context.options, computed)
        if other is not None and other[0] not in reported:
            name, was, now = other
            reported.add(name)
            yield f"the {context.role} runs with {was}, and in this job (engine.{name}) {now}"
        yield from _context_problems(plan, context)
    for phase in plan.phases:
        yield from _order_problems(config, phase)
    yield from _rank_problems(plan)
    settings = resolution.settings()
    for name in ("optimizers", "set_aside", "merged"):
        was, value = getattr(chosen.settings, name), getattr(settings, name)
        if was != value:
            planned_with = f"it was planned with {name}={shown(was)}"
            yield f"{planned_with}, and this job has {shown(value)}: {_AGAIN}"


def _work(phase: Phase | PhaseRoles, contexts: Sequence[tuple[str, Workload]]) -> str:
    """A phase and the work in it, such as ``train (infer reference, train actor)``."""
    work = ", ".join(f"{workload} {role}" for role, workload in contexts)
    return f"{phase.name} ({work}){' once' * phase.once}"


def _first_difference(planned: Any, here: Any) -> tuple[str, str, str] | None:
    """The first field that differs: its name, the planned ``name=value``, and the job's value.

    The job's value carries the cure, to plan again.
    """
    for item in fields(here):
        was, value = getattr(planned, item.name), getattr(here, item.name)
        if was != value:
            return item.name, f"{item.name}={shown(was)}", f"{shown(value)}: {_AGAIN}"
    return None


def _context_problems(plan: JobPlan, context: ContextPlan) -> Iterator[str]:
    """A role with several plans, ranks or options; only sampling may differ in plan and ranks."""
    kept = plan.models[context.role]
    if context.options != kept.options:
        yield f"the {context.role} has different options in different phases: give it the same"
    elsewhere = context.placed != kept.placed
    if elsewhere and context.workload != "generate":
        yield (
            f"the {context.role} has another plan, or other ranks, to {context.workload} than to "
            f"{kept.workload}: give it the same, only sampling may differ"
        )


def _order_problems(config: JobConfig, phase: Phase) -> Iterator[str]:
    """Execution order that a phase's contexts do not allow."""
    loss = config.reference_loss
    why = loss.sequence_reason if loss is not None and phase.is_fed else None
    orders = {resolve_order(phase.contexts, share=share) for share in (False, why is None)}
    if phase.order in orders and (why is None or phase.order == "sequential"):
        return
    if why is None and phase.order == "time_shared":
        why = sharing_obstacle(phase.contexts)
    if why is None:
        why = f"its models' ranks make it {' or '.join(sorted(orders))}"
    yield f"phase {phase.name} has order={phase.order}, but {why}: change one"


def _rank_problems(plan: JobPlan) -> Iterator[str]:
    """Idle ranks, and placements that the stage does not support."""
    held = {rank for context in plan.contexts for rank in context.ranks}
    idle = [rank for rank in range(plan.world_size) if rank not in held]
    if idle:
        yield f"ranks {shown(', '.join(map(str, idle)))} hold no model: use them, or plan for fewer"
    if STAGES[plan.stage].ranks_by_role:
        return
    for phase in plan.phases:
        whole = all(len(context.ranks) == plan.world_size for context in phase.contexts)
        if not whole and phase.order != "concurrent":
            yield (
                f"the models of phase {phase.name} hold only some of the ranks: in stage "
                f"{plan.stage} each holds all, or they hold different ones (concurrent)"
            )
        elif phase.trained and 0 not in phase.trained[0].ranks:
            yield f"rank 0 does not train the {phase.trained[0].role}: it writes the metrics"


def _row_problems(plan: ParallelPlan, row_tokens: int, key: str) -> Iterator[str]:
    if row_tokens % plan.sequence_shards:
        yield (
            f"packing.row_tokens: {row_tokens} does not divide over the {plan.tensor} "
            f"sequence-parallel ranks of {key}; choose a multiple of {plan.tensor}"
        )


def _fp8_problems(resolution: Resolution, role: str, plan: ParallelPlan, key: str) -> Iterator[str]:
    """Row lengths and layer widths that FP8 does not support under a plan."""
    engine, row_tokens = resolution.config.engine, resolution.config.packing.row_tokens
    multiple = FP8_MULTIPLES[engine.fp8_recipe]
    row_multiple = multiple * plan.sequence_shards
    if row_tokens % row_multiple:
        yield (
            f"packing.row_tokens: {row_tokens} cannot be cut for engine.fp8={engine.fp8} "
            f"({engine.fp8_recipe}) under {key}; choose a multiple of {row_multiple}"
        )
    if role not in resolution.models:  # reported with the model
        return
    model = resolution.models[role]
    spec, heads = model.spec, model.spec.num_attention_heads
    widths = (
        ("hidden_size", spec.hidden_size),
        ("heads times head_dim", heads * spec.head_dim // plan.tensor),
        (
            "queries, keys and values",
            (heads + 2 * spec.num_key_value_heads) * spec.head_dim // plan.tensor,
        ),
        ("intermediate_size", spec.intermediate_size // plan.tensor),
    )
    for name, width in widths:
        if width % multiple:
            yield (
                f"engine.fp8: {engine.fp8} ({engine.fp8_recipe}) needs multiples of {multiple}, "
                f"and {name} of {model.key} is {width} on a tensor rank; set it to null"
            )
