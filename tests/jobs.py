"""Jobs as the ranks get them: resolved, or of contexts that a test places by hand."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from puzzle_align.config.check import problems
from puzzle_align.config.job import JobConfig
from puzzle_align.config.resolution import Engine, Resolution, RoleModel
from puzzle_align.config.resolve import Job
from puzzle_align.layout.job_plan import ContextPlan, JobPlan, Phase
from puzzle_align.layout.model import ModelOptions

if TYPE_CHECKING:  # these import torch
    from puzzle_align.stages.trainer import Trainer
    from puzzle_align.stages.weights import Starts

_SIZES = {
    "P": "pipeline_model_parallel_size",
    "D": "data_parallel_size",
    "T": "tensor_model_parallel_size",
    "V": "virtual_pipeline_model_parallel_size",
    "sp": "sequence_parallel",
}


def parallel(role: str, **sizes: int | bool) -> list[str]:
    """Overrides that give a role a plan: P, D, T, V and sp."""
    return [f"{role}.parallel.{_SIZES[k]}={str(v).lower()}" for k, v in sizes.items()]


def resolved(config: JobConfig, world_size: int = 1, *, elsewhere: bool = False) -> Job:
    """The job on this machine, or on one with its device, of a config that nobody has checked."""
    from puzzle_align.stages.engine import resolve_engine

    engine = resolve_engine(config.engine, elsewhere=elsewhere)
    resolution = Resolution(config, world_size, engine)
    return Job(
        config=resolution.pinned(),
        plan=resolution.plan,
        settings=resolution.settings(),
        engine=resolution.engine,
        models=resolution.all_models(),
    )


def run_to_end(trainer: "Trainer", starts: "Starts | None" = None) -> None:
    """Train with this trainer, its folders held meanwhile. Collective."""
    from puzzle_align.stages.run import claimed, train

    with claimed(trainer.job.config) as saved:
        train(trainer, starts or {}, saved)


def placed(
    config: JobConfig, *contexts: ContextPlan, models: Mapping[str, RoleModel] | None = None
) -> Job:
    """The job of these contexts in one phase; without ``models``, with those of the config."""
    world_size = 1 + max(rank for context in contexts for rank in context.ranks)
    phase = Phase(name="train", order="sequential", contexts=contexts)
    engine = Engine("cpu", contexts[0].options)
    return Job(
        config=config,
        plan=JobPlan(stage=config.stage, world_size=world_size, phases=(phase,)),
        settings=Resolution(config, engine=engine).settings(),
        engine=engine,
        models=models or {own.role: model_of(config, own.role) for own in contexts},
    )


def job_plan(config: JobConfig, options: ModelOptions, world_size: int) -> JobPlan:
    """Who is where, of a config that nobody has checked."""
    return Resolution(config, world_size, Engine("cpu", options)).plan


def model_of(config: JobConfig, role: str) -> RoleModel:
    """A role's model, of a config that nobody has checked."""
    return Resolution(config).model(role)


def problems_of(config: JobConfig, world_size: int) -> list[str]:
    """Everything wrong with a job on so many ranks."""
    return problems(Resolution(config, world_size))
