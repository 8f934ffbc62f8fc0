"""Resolve a config into a ``Job``: plain data that the rest of the package reads.

Rank 0 makes the ``Job`` and sends it to the other ranks: paths, models and plans are resolved
once.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from puzzle_align.config.check import problems, raise_first
from puzzle_align.config.chosen_plan import ChosenPlan
from puzzle_align.config.job import JobConfig
from puzzle_align.config.model_path import ModelPaths
from puzzle_align.config.resolution import Engine, Resolution, RoleModel, with_path
from puzzle_align.config.roles import role_model
from puzzle_align.config.saved import Saved, is_checkpoint_of
from puzzle_align.config.sections.data import TokenizerConfig
from puzzle_align.config.sections.optimizer import OptimizerConfig
from puzzle_align.files.messages import reading
from puzzle_align.layout.job_plan import JobPlan, Settings
from puzzle_align.layout.main_weights import Buckets
from puzzle_align.layout.model import AttentionBackend, ModelOptions


@dataclass(frozen=True, kw_only=True)
class Job:
    """A job on its ranks.

    ``config`` has the tokenizer filled in, and a checkpoint's path in place of a folder of them.
    ``models`` are by role, trained ones first.
    """

    config: JobConfig
    plan: JobPlan
    settings: Settings
    engine: Engine
    models: Mapping[str, RoleModel]

    @property
    def tokenizer(self) -> TokenizerConfig:
        """The job's tokenizer; path None: bytes."""
        return self.config.tokenizer

    def optimizer(self, role: str) -> OptimizerConfig:
        """The optimizer of a trained role."""
        optimizer = self.models[role].optimizer
        assert optimizer is not None, f"the {role} is not trained"
        return optimizer

    def shards_sent(self, role: str) -> Buckets | None:
        """Buckets of a role's optimizer if its shards send weights to a copy; else None."""
        optimizer = self.optimizer(role)
        early = self.settings.overlap_switch and optimizer.use_distributed_optimizer
        return Buckets(overlapped=optimizer.overlap_grad_reduce) if early else None

    def with_attention(self, attention: AttentionBackend) -> "Job":
        """The job with another attention backend."""

        def chosen(options: ModelOptions) -> ModelOptions:
            return replace(options, attention=attention)

        phases = tuple(
            replace(
                phase,
                contexts=tuple(replace(c, options=chosen(c.options)) for c in phase.contexts),
            )
            for phase in self.plan.phases
        )
        engine = replace(self.engine, options=chosen(self.engine.options))
        return replace(self, engine=engine, plan=replace(self.plan, phases=phases))


@dataclass(frozen=True, kw_only=True)
class Resolved:
    """The result of resolving a job; ``job`` is None if there are ``problems``.

    ``config`` has the checkpoints and tokenizer that were found filled in; ``models`` has the
    roles with a usable model.
    """

    config: JobConfig
    problems: tuple[str, ...]
    models: Mapping[str, RoleModel]
    tokenizer: TokenizerConfig | None  # None: of a model that could not be opened
    kept: tuple[str, ...] = ()  # a line for each model that a resumed job keeps
    job: Job | None = None


def resolve(
    config: JobConfig,
    engine: Engine,
    world_size: int,
    chosen: ChosenPlan | None = None,
    paths: ModelPaths | None = None,
) -> Job:
    """The job on ``world_size`` ranks, checked.

    Args:
        chosen: a plan from a file, in place of the config's.
        paths: models that are open already.

    Raises:
        ValueError: one line, with the first problem.
    """
    resolved = try_to_resolve(config, engine, world_size, chosen, paths=paths)
    raise_first(resolved.problems)
    assert resolved.job is not None, "nothing is wrong with it"
    return resolved.job


def try_to_resolve(
    config: JobConfig,
    engine: Engine,
    world_size: int,
    chosen: ChosenPlan | None = None,
    resumed: Saved | None = None,
    *,
    paths: ModelPaths | None = None,
    unread: Sequence[str] = (),
) -> Resolved:
    """Resolve a job, collecting all problems, a line each, instead of raising the first.

    Args:
        resumed: the checkpoint to resume from; the job keeps the models it began with.
        unread: keys whose problems are ignored, because they are not read.
    """
    lines: list[str] = []
    kept: list[str] = []
    if resumed is not None and resumed.has_optimizers:
        try:
            config, kept = keep_models(config, resumed)
        except ValueError as error:
            lines.append(str(error))
    resolution = Resolution(config, world_size, engine, chosen, paths)
    lines += [line for line in problems(resolution) if line.partition(":")[0] not in unread]
    tokenizer = None
    try:
        tokenizer = resolution.tokenizer()
    except ValueError as error:
        if not lines:  # else a missing model is reported already
            lines.append(str(error))
    pinned = resolution.pinned(tokenizer or resolution.config.tokenizer)
    job = None
    if not lines:
        job = Job(
            config=pinned,
            plan=resolution.plan,
            settings=resolution.settings() if chosen is None else chosen.settings,
            engine=engine,
            models=resolution.models,
        )
    return Resolved(
        config=pinned,
        problems=tuple(lines),
        models=resolution.models,
        tokenizer=tokenizer,
        kept=tuple(kept),
        job=job,
    )


def keep_models(config: JobConfig, saved: Saved) -> tuple[JobConfig, list[str]]:
    """Replace folders of checkpoints by the checkpoints that the saved job began with.

    Returns:
        The config, and a line for every changed path.

    Raises:
        ValueError: one line, if one of these checkpoints is gone, or cannot be read.
    """
    began = saved.job["config"]
    kept: list[str] = []
    for role in dict.fromkeys(
        role_model(config, r)[1].partition(".")[0] for r in Resolution(config).roles
    ):
        path = getattr(config, role).model.path
        was = began.get(role, {}).get("model", {}).get("path")
        if path is None or was is None or not is_checkpoint_of(was, path):
            continue
        with reading(Path(was), key=f"{role}.model.path"):
            is_there = (Path(was) / "job.json").is_file()
        if not is_there:
            raise ValueError(
                f"{role}.model.path: the job in {saved.path} began with {was}, which is gone: put "
                "it back, or start anew with another output_dir"
            )
        kept.append(f"{role}.model.path={path}: going on with {was}, which the job began with")
        config = with_path(config, role, was)
    return config, kept
