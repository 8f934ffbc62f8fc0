"""Jobs as the ranks get them: resolved, or of contexts that a test places by hand."""

from collections.abc import Mapping

from puzzle_align.config.job import JobConfig
from puzzle_align.config.resolution import Resolution, RoleModel
from puzzle_align.config.resolve import Engine, Job, job_settings, resolve_names
from puzzle_align.layout.job_plan import ContextPlan, JobPlan, Phase
from puzzle_align.layout.model import ModelOptions


def resolved(config: JobConfig, world_size: int = 1) -> Job:
    """The job on this machine, of a config that nobody has checked."""
    from puzzle_align.stages.engine import resolve_engine

    engine = resolve_engine(config.engine)
    config, models = resolve_names(config)
    return Job(
        config=config,
        plan=job_plan(config, engine.options, world_size),
        settings=job_settings(config, engine.device),
        engine=engine,
        models=models,
    )


def placed(
    config: JobConfig, *contexts: ContextPlan, models: Mapping[str, RoleModel] | None = None
) -> Job:
    """The job of these contexts in one phase; without ``models``, with those of the config."""
    world_size = 1 + max(rank for context in contexts for rank in context.ranks)
    phase = Phase(name="train", order="sequential", contexts=contexts)
    return Job(
        config=config,
        plan=JobPlan(stage=config.stage, world_size=world_size, phases=(phase,)),
        settings=job_settings(config, "cpu"),
        engine=Engine("cpu", contexts[0].options),
        models=models or {own.role: model_of(config, own.role) for own in contexts},
    )


def job_plan(config: JobConfig, options: ModelOptions, world_size: int) -> JobPlan:
    """Who is where, of a config that nobody has checked."""
    return Resolution(config, world_size).job_plan(options)


def model_of(config: JobConfig, role: str) -> RoleModel:
    """A role's model, of a config that nobody has checked."""
    return Resolution(config).model(role)
