"""A plan chosen for a job, in place of the one that its config would make.

The plan replaces the keys that it decides (``with_plan``), and the rest has to fit it
(``plan_problems``): the same roles at work, the same models, and sizes that cut them. A plan that
fits is run as it is, also where no config would make it.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from puzzle_align.config.job import JobConfig
from puzzle_align.config.roles import ROLES, fp8_of, job_phases, reference_loss
from puzzle_align.config.schema import is_among
from puzzle_align.config.sections.engine import FUSIONS
from puzzle_align.config.sections.models import PlacementConfig
from puzzle_align.config.stages import STAGES
from puzzle_align.files.messages import shown
from puzzle_align.layout.job_plan import (
    ContextPlan,
    JobPlan,
    Phase,
    Settings,
    resolve_order,
    sharing_obstacle,
)
from puzzle_align.layout.model import ModelOptions, ModelSpec

_AGAIN = "plan this job again"


@dataclass(frozen=True, kw_only=True)
class ChosenPlan:
    """A plan and its sizes, for a device; ``source`` is the file, for errors."""

    source: str
    plan: JobPlan
    settings: Settings
    device: str

    def check_world_size(self, world_size: int) -> None:
        """Raise a one-line ValueError if that is not the number of ranks that was planned for."""
        planned = self.plan.world_size
        if world_size != planned:
            raise ValueError(
                f"{self.source} is for {planned} ranks, and the job would have {world_size}: start "
                f"{planned}, or plan for {world_size}"
            )


def decided_keys(stage: str, roles: Iterable[str]) -> tuple[str, ...]:
    """The config's keys and sections that a plan of these roles decides."""
    keys = [f"engine.{name}" for name in ("device", "dtype", "attention", "transformer_impl")]
    keys += [f"engine.{name}" for name in FUSIONS]
    keys += ["packing.row_tokens", *(f"{role}.parallel" for role in roles)]
    if STAGES[stage].ranks_by_role:
        keys += [f"{role}.ranks" for role in roles]
        keys += ["placement.score", "placement.learn"]
        sizes = ("prefill_tokens", "decode_batch_size", "overlap_switch")
        keys += [f"generation.{name}" for name in ("parallel", "ranks", *sizes)]
    elif "reference" in roles:
        keys += ["placement.reference", f"{STAGES[stage].loss}.precompute_ref_log_probs"]
    return tuple(keys)


def refuse_overrides(overrides: Iterable[str], source: str, keys: Iterable[str]) -> None:
    """Raise a one-line ValueError if an override sets a key that ``source`` decides."""
    for override in overrides:
        name = override.partition("=")[0]
        for key in keys:
            if is_among(name, (key,)) or is_among(key, (name,)):
                raise ValueError(
                    f"override '{shown(override)}': {source} decides '{key}'; leave the override "
                    "out, or plan the job again with it"
                )


def with_plan(config: JobConfig, chosen: ChosenPlan) -> JobConfig:
    """The config with the plan's sizes, and without the plans and placements of its own.

    Raises:
        ValueError: one line, if the plan is for another stage.
    """
    plan, settings = chosen.plan, chosen.settings
    if plan.stage != config.stage:
        raise ValueError(
            f"{chosen.source} is for stage {plan.stage}, and the job is of stage {config.stage}: "
            "name the config that was planned, or plan this job again"
        )
    options = plan.contexts[0].options
    engine = {
        "device": chosen.device,
        "dtype": options.dtype,
        "attention": options.attention,
        "transformer_impl": options.transformer_impl,
        **asdict(options.fusions),
    }
    changed: dict[str, Any] = {
        role: replace(getattr(config, role), parallel=None, ranks=None) for role in ROLES
    }
    changed["engine"] = replace(config.engine, **engine)
    changed["packing"] = replace(config.packing, row_tokens=settings.row_tokens)
    changed["placement"] = PlacementConfig(profile=config.placement.profile)
    if STAGES[config.stage].ranks_by_role:
        changed["generation"] = replace(
            config.generation,
            parallel=None,
            ranks=None,
            prefill_tokens=settings.prefill_tokens,
            decode_batch_size=settings.decode_batch_size,
            overlap_switch=settings.overlap_switch,
        )
    loss = reference_loss(config)
    if loss is not None and "reference" in plan.models:
        before = any(phase.once for phase in plan.phases)
        changed[loss.section] = replace(loss, precompute_ref_log_probs=before)
    return replace(config, **changed)


def plan_problems(
    config: JobConfig,
    models: Mapping[str, tuple[ModelSpec, str]],
    chosen: ChosenPlan,
    options: ModelOptions,
    settings: Settings,
) -> Iterator[str]:
    """Reasons why a job cannot run by a plan, its sizes aside, a line each.

    Args:
        models: the job's, by role, with the dotted key of each.
        options: how this machine computes models.
        settings: the job's.
    """
    plan = chosen.plan
    planned, wanted = [*_works(plan.phases)], [*_works(job_phases(config))]
    if planned != wanted:
        others = [work for work in planned if work not in wanted] or planned
        instead = [work for work in wanted if work not in planned] or wanted
        yield f"it has {shown(', '.join(others))}, and this job {', '.join(instead)}: {_AGAIN}"
        return
    reported: set[str] = set()  # roles may share a model or an option: report it once
    for context in plan.contexts:
        spec, key = models[context.role]
        other = _first_difference(context.model, spec)
        if other is not None and key not in reported:
            reported.add(key)
            yield f"the {context.role}'s model has {other[1]}, and in this job ({key}) {other[2]}"
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
        yield from _home_problems(plan, context)
    for phase in plan.phases:
        yield from _order_problems(config, phase)
    yield from _rank_problems(plan)
    for name in ("optimizers", "set_aside"):
        was, value = getattr(chosen.settings, name), getattr(settings, name)
        if was != value:
            yield f"it counts on {name}={shown(was)}, and this job has {shown(value)}: {_AGAIN}"


def _works(phases: Iterable[Any]) -> Iterator[str]:
    """The phases of a job with the work in each: ``train (infer reference, train actor)``."""
    for phase in phases:
        work = ", ".join(f"{workload} {role}" for role, workload in _roles(phase))
        yield f"{phase.name} ({work}){' once' * phase.once}"


def _roles(phase: Any) -> Iterator[tuple[str, str]]:
    for each in phase.contexts:
        yield (each.role, each.workload) if isinstance(each, ContextPlan) else each


def _first_difference(planned: Any, here: Any) -> tuple[str, str, str] | None:
    """The first field of two dataclasses that differs: its name, ``name=value``, and the value.

    The cure follows the value: planning again puts it into the plan.
    """
    for item in fields(here):
        was, value = getattr(planned, item.name), getattr(here, item.name)
        if was != value:
            return item.name, f"{item.name}={shown(was)}", f"{shown(value)}: {_AGAIN}"
    return None


def _home_problems(plan: JobPlan, context: ContextPlan) -> Iterator[str]:
    """Weights of one role under several plans; only sampling may have a copy under its own."""
    home = plan.models[context.role]
    if context.options != home.options:
        yield f"the {context.role} computes otherwise in different phases: give it the same options"
    elsewhere = (context.plan, context.ranks) != (home.plan, home.ranks)
    if elsewhere and context.workload != "generate":
        yield (
            f"the {context.role} has another plan, or other ranks, to {context.workload} than to "
            f"{home.workload}: give it the same, only sampling may have its own"
        )


def _order_problems(config: JobConfig, phase: Phase) -> Iterator[str]:
    """Execution orders that a phase's contexts do not allow."""
    loss = reference_loss(config)
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
    """Ranks that have nothing to do, or that a stage needs elsewhere."""
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
                f"the models of phase {phase.name} are on some of the ranks: of stage {plan.stage} "
                "they are on all, or each on its own (concurrent)"
            )
        elif phase.trained and 0 not in phase.trained[0].ranks:
            yield f"rank 0 does not train the {phase.trained[0].role}: it writes the metrics"
