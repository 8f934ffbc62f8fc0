"""The planner's input from a job: its models, phases and settings."""

from collections.abc import Iterable
from dataclasses import asdict, replace
from typing import Any

from puzzle_align.config.job import JobConfig
from puzzle_align.config.resolution import Engine, Resolution, RoleModel
from puzzle_align.config.roles import ROLES, PhaseRoles, job_phases
from puzzle_align.config.stages import STAGES
from puzzle_align.planning.costs.profile import Profile
from puzzle_align.planning.search.space import JobToPlan

_MEASURED = ("dtype", "attention", "transformer_impl")


def resolution_to_plan(config: JobConfig, profile: Profile) -> Resolution:
    """Resolve a job without its plans, computed as the profile was measured.

    Raises:
        ValueError: one line, if the config asks for another engine.
    """
    _check_engine(config, profile)
    options = replace(
        profile.options, recompute="none", logprob_chunk_size=config.engine.logprob_chunk_size
    )
    hardware = profile.hardware
    engine = Engine(hardware.device, options, orders_ranks=hardware.orders_ranks)
    return Resolution(config, engine=engine)


def job_to_plan(resolution: Resolution, profile: Profile) -> JobToPlan:
    """Make the planner's job, ignoring the config's own plans and placement.

    Raises:
        ValueError: one line, if the job's optimizer differs from the measured one, or a model
            cannot be read.
    """
    config, models = resolution.config, resolution.all_models()
    _check_optimizers(config, models.values(), profile)
    loss, reason = config.reference_loss, None
    if loss is not None:
        reason = replace(loss, precompute_ref_log_probs=False).sequence_reason
    if reason is not None:
        raise ValueError(
            f"{reason}: the planner has no plans for such a step; choose the job's plan by hand"
        )
    phases, before = _phases(config)
    parallels = [getattr(config, role).parallel for role in ROLES]
    asked = any(parallel is not None and parallel.sequence_parallel for parallel in parallels)
    return JobToPlan(
        stage=config.stage,
        trained=resolution.trained,
        phases=phases,
        before=before,
        models={role: model.spec for role, model in models.items()},
        bases={role: resolution.base(role) for role in models},
        options=resolution.engine.options,
        settings=resolution.settings(),
        sequence_parallel=asked or resolution.engine.device == "cuda",
        ranks_by_role=STAGES[config.stage].ranks_by_role,
    )


def _phases(config: JobConfig) -> tuple[tuple[PhaseRoles, ...], tuple[PhaseRoles, ...]]:
    """Phases with all models live, and phases with a precomputed reference, if possible."""
    loss = config.reference_loss
    if loss is None:
        return job_phases(config), ()
    live, before = (
        job_phases(
            replace(config, **{loss.section: replace(loss, precompute_ref_log_probs=precompute)})
        )
        for precompute in (False, True)
    )
    return live, () if before == live or loss.live_reason is not None else before


def _check_engine(config: JobConfig, profile: Profile) -> None:
    if config.engine.fp8 is not None:
        raise ValueError(
            f"engine.fp8: {config.engine.fp8}, but the planner has no times or memory of FP8; "
            "set it to null"
        )
    there: dict[str, Any] = {name: getattr(profile.options, name) for name in _MEASURED}
    there |= {"device": profile.hardware.device, **asdict(profile.options.fusions)}
    for name in there:
        value = getattr(config.engine, name)
        if value not in ("auto", there[name]):
            raise ValueError(
                f"engine.{name}: {value}, but the profile was measured with {there[name]}: profile "
                "with the job's, or change it"
            )


def _check_optimizers(config: JobConfig, models: Iterable[RoleModel], profile: Profile) -> None:
    """Raise a one-line ValueError if an optimizer was measured with other options."""
    for model in models:
        optimizer = model.optimizer
        section = "critic.optimizer" if optimizer is config.critic.optimizer else "optimizer"
        for point in () if optimizer is None else profile.of(model.spec).optimizer:
            for name in ("state_dtype", "cpu_offload"):
                value, there = getattr(optimizer, name), getattr(point, name)
                if value != there:
                    raise ValueError(
                        f"{section}.{name}: {value}, but the profile's optimizer steps were "
                        f"measured with {there}: profile with the job's, or change it"
                    )
