"""Jobs as the ranks get them: resolved, or of contexts that a test places by hand."""

from collections.abc import Mapping

from puzzle_align.config.job import JobConfig
from puzzle_align.config.resolve import Engine, Job, RoleModel, job_settings, resolve, resolve_model
from puzzle_align.layout.job_plan import ContextPlan, JobPlan, Phase
from puzzle_align.stages.setup import resolve_engine


def resolved(config: JobConfig, world_size: int = 1) -> Job:
    """The job on this machine."""
    return resolve(config, resolve_engine(config.engine), world_size)


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
        models=models or {own.role: resolve_model(config, own.role) for own in contexts},
    )
