"""A job as the planner sees it: its models and phases, and what an iteration has to do."""

from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

from puzzle_align.config.job import JobConfig
from puzzle_align.config.resolve import RoleModel, job_settings, resolve_names
from puzzle_align.config.roles import (
    ROLES,
    PhaseRoles,
    job_phases,
    reference_loss,
    trained_roles,
)
from puzzle_align.config.stages import STAGES
from puzzle_align.planning.costs.profile import Profile
from puzzle_align.planning.search.space import Job

_MEASURED = ("dtype", "attention", "transformer_impl")


def job_to_plan(config: JobConfig, profile: Profile) -> Job:
    """The job, whatever its own plans and placement say.

    Raises:
        ValueError: one line, where it is to be computed otherwise than was measured, or a model is
            not to be had.
    """
    _check_engine(config, profile)
    _, models = resolve_names(config)
    _check_optimizers(models, config, profile)
    loss = reference_loss(config)
    reason = None
    if loss is not None:
        reason = replace(loss, precompute_ref_log_probs=False).sequence_reason
    if reason is not None:
        raise ValueError(f"{reason}: such a step is not planned for; choose the job's plan by hand")
    phases, before = _phases(config)
    own = [getattr(config, role).parallel for role in ROLES]
    asked = any(parallel is not None and parallel.sequence_parallel for parallel in own)
    device = profile.hardware.device
    return Job(
        stage=config.stage,
        trained=trained_roles(config),
        phases=phases,
        before=before,
        models={role: model.spec for role, model in models.items()},
        options=replace(
            profile.options,
            recompute="none",
            logprob_chunk_size=config.engine.logprob_chunk_size,
        ),
        settings=job_settings(config, device),
        sequence_parallel=asked or device == "cuda",
        ranks_by_role=STAGES[config.stage].ranks_by_role,
    )


def _phases(config: JobConfig) -> tuple[tuple[PhaseRoles, ...], tuple[PhaseRoles, ...]]:
    """Those with all models live, and those with the reference run before the training, if any."""
    loss = reference_loss(config)
    if loss is None:
        return job_phases(config), ()
    live, before = (
        job_phases(replace(config, **{loss.section: replace(loss, precompute_ref_log_probs=own)}))
        for own in (False, True)
    )
    return live, () if before == live or loss.live_reason is not None else before


def _check_engine(config: JobConfig, profile: Profile) -> None:
    if config.engine.fp8 is not None:
        raise ValueError(
            f"engine.fp8: {config.engine.fp8}, whose times and memory the planner does not know; "
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


def _check_optimizers(models: Mapping[str, RoleModel], config: JobConfig, profile: Profile) -> None:
    """Raise a one-line ValueError for optimizers that were measured otherwise; others may lack."""
    for model in models.values():
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
