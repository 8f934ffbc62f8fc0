"""A job resolved once: everything that its config says, as plain data that all parts read.

Rank 0 makes the ``Job`` and the other ranks get it: no path is opened, and no plan or model worked
out, a second time.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from puzzle_align.config.check import problems_of, raise_first
from puzzle_align.config.chosen_plan import ChosenPlan, with_plan
from puzzle_align.config.job import JobConfig
from puzzle_align.config.model_path import is_checkpoint
from puzzle_align.config.resolution import Resolution, RoleModel, plan_on, with_layers
from puzzle_align.config.roles import (
    optimizer_config,
    reference_loss,
    role_model,
    role_names,
    role_parallel,
    trained_roles,
)
from puzzle_align.config.saved import Saved, is_checkpoint_of
from puzzle_align.config.sections.data import TokenizerConfig
from puzzle_align.config.sections.models import RoleConfig
from puzzle_align.config.sections.optimizer import OptimizerConfig
from puzzle_align.config.sections.preference import ReferenceLossConfig
from puzzle_align.layout.job_plan import ContextPlan, JobPlan, OptimizerStates, Settings
from puzzle_align.layout.model import AttentionBackend, ModelOptions, ModelSpec


@dataclass(frozen=True)
class Engine:
    """The engine section with every ``auto`` decided."""

    device: str  # cpu | cuda
    options: ModelOptions


@dataclass(frozen=True, kw_only=True)
class Job:
    """A job on its ranks.

    ``config`` names the checkpoints that are taken, where the user named folders of them, and the
    tokenizer. ``models`` are by role, the trained ones first.
    """

    config: JobConfig
    plan: JobPlan
    settings: Settings
    engine: Engine
    models: Mapping[str, RoleModel]

    @property
    def tokenizer(self) -> TokenizerConfig:
        """The job's tokenizer; a path of None: bytes."""
        return self.config.tokenizer

    @property
    def reference_loss(self) -> ReferenceLossConfig | None:
        """The loss of a stage that holds a policy against a reference; None of other stages."""
        return reference_loss(self.config)

    def optimizer(self, role: str) -> OptimizerConfig:
        """The optimizer of a trained role."""
        optimizer = self.models[role].optimizer
        assert optimizer is not None, f"the {role} is not trained"
        return optimizer

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
    """A job as far as it could be resolved; ``job`` is None where there are ``problems``.

    ``config`` names checkpoints and tokenizer as far as they are there, and ``models`` has the
    roles whose models are there.
    """

    config: JobConfig
    problems: tuple[str, ...]
    models: Mapping[str, RoleModel]
    tokenizer: TokenizerConfig | None  # None: it is a model's that is not there
    kept: tuple[str, ...] = ()  # models that a resumed job keeps, a line each
    job: Job | None = None


def resolve(
    config: JobConfig, engine: Engine, world_size: int, chosen: ChosenPlan | None = None
) -> Job:
    """The job on ``world_size`` ranks, checked.

    Args:
        chosen: the plan of a file, in place of the one that the config would make.

    Raises:
        ValueError: one line, with the first thing that is wrong with it.
    """
    resolved = try_to_resolve(config, engine, world_size, chosen)
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
    unread: Sequence[str] = (),
) -> Resolved:
    """Resolve a job, collecting all problems, a line each, instead of raising the first.

    Args:
        resumed: the checkpoint that the job goes on from; the job keeps the models it began with.
        unread: keys that are not read: their problems are left out.
    """
    lines: list[str] = []
    kept: list[str] = []
    if resumed is not None and resumed.has_optimizers:
        try:
            config, kept = keep_models(config, resumed)
        except ValueError as error:
            lines.append(str(error))
    if chosen is not None:
        config = with_plan(config, chosen)
    resolution = Resolution(config, world_size)
    settings = job_settings(config, engine.device)
    job_lines = problems_of(resolution, chosen, engine.options, settings)
    lines += [line for line in job_lines if line.partition(":")[0] not in unread]
    models = {}
    for role in resolution.roles:
        with suppress(ValueError):  # it is among the problems
            models[role] = resolution.model(role)
    tokenizer = None
    with suppress(ValueError):  # it is among the problems, too
        tokenizer = resolution.tokenizer()
    pinned = _pinned(config, models, tokenizer)
    job = None
    if not lines:
        job = Job(
            config=pinned,
            plan=resolution.job_plan(engine.options) if chosen is None else chosen.plan,
            settings=settings if chosen is None else chosen.settings,
            engine=engine,
            models=models,
        )
    return Resolved(
        config=pinned,
        problems=tuple(lines),
        models=models,
        tokenizer=tokenizer,
        kept=tuple(kept),
        job=job,
    )


def resolve_names(config: JobConfig) -> tuple[JobConfig, dict[str, RoleModel]]:
    """The config with checkpoints and tokenizer named, and the job's models; no plan is looked at.

    Raises:
        ValueError: one line, for a model that is not there or does not suit its role.
    """
    resolution = Resolution(config)
    models = {role: resolution.model(role) for role in resolution.roles}
    return _pinned(config, models, resolution.tokenizer()), models


def resolve_tokenizer(config: JobConfig) -> TokenizerConfig:
    """The job's tokenizer, its path named. ValueError as ``resolve_names``."""
    return Resolution(config).tokenizer()


def resolve_context(
    config: JobConfig, spec: ModelSpec, options: ModelOptions, world_size: int
) -> ContextPlan:
    """The actor that generates alone on all ranks, of the dimensions ``spec``.

    The config is one without ``check.generation_problems``.
    """
    parallel, _ = role_parallel(config, "actor")
    grid = plan_on(parallel, world_size)
    assert grid is not None, "it is among the problems of generation"
    return ContextPlan(
        role="actor",
        workload="generate",
        model=spec,
        options=replace(options, recompute=parallel.recompute),
        plan=with_layers(grid, config, parallel, spec, train=True),
        ranks=tuple(range(world_size)),
    )


def smallest_world_size(config: JobConfig) -> int:
    """The fewest ranks on which the plans of all roles can lie, as far as there are any."""
    return Resolution(config).smallest_world_size()


def _pinned(
    config: JobConfig, models: Mapping[str, RoleModel], tokenizer: TokenizerConfig | None
) -> JobConfig:
    """The config with its checkpoints and tokenizer named, so that nobody looks for them again."""
    config = replace(config, tokenizer=tokenizer or config.tokenizer)
    for model in models.values():
        if model.files is not None and model.files.saved is not None:
            config = _with_path(config, model.key.partition(".")[0], str(model.files.path))
    return config


def keep_models(config: JobConfig, saved: Saved) -> tuple[JobConfig, list[str]]:
    """The job with the checkpoints that it began with, in place of the folders that hold them.

    Returns:
        the job, and a line for every path that it changed.

    Raises:
        ValueError: one line, if one of those checkpoints is gone.
    """
    began = saved.job.get("config", {})
    kept: list[str] = []
    for role in dict.fromkeys(
        role_model(config, r)[1].partition(".")[0] for r in role_names(config)
    ):
        path = getattr(config, role).model.path
        was = began.get(role, {}).get("model", {}).get("path")
        if path is None or was is None:
            continue
        if not is_checkpoint(Path(path)) or not is_checkpoint_of(was, path):
            continue
        if not (Path(was) / "job.json").is_file():
            raise ValueError(
                f"{role}.model.path: the job in {saved.path} began with {was}, which is gone: put "
                "it back, or start anew with another output_dir"
            )
        kept.append(f"{role}.model.path={path}: going on with {was}, which the job began with")
        config = _with_path(config, role, was)
    return config, kept


def _with_path(config: JobConfig, role: str, path: str) -> JobConfig:
    section: RoleConfig = getattr(config, role)
    return replace(config, **{role: replace(section, model=replace(section.model, path=path))})


def job_settings(config: JobConfig, device: str) -> Settings:
    """Settings of the config that decide times and memory beside plans."""
    optimizers = {role: optimizer_config(config, role) for role in trained_roles(config)}
    set_aside: tuple[str, ...] = ()
    if config.generation.offload_optimizer:
        # On a CPU, the optimizer's state is where it would go to.
        set_aside = ("gradients", "optimizer") if device == "cuda" else ("gradients",)
    return Settings(
        row_tokens=config.packing.row_tokens,
        optimizers=OptimizerStates(
            sharded=tuple(
                r for r, optimizer in optimizers.items() if optimizer.use_distributed_optimizer
            ),
            small=tuple(
                r for r, optimizer in optimizers.items() if optimizer.state_dtype == "bf16"
            ),
            on_host=tuple(r for r, optimizer in optimizers.items() if optimizer.cpu_offload),
        ),
        prefill_tokens=config.generation.prefill_tokens,
        decode_batch_size=config.generation.decode_batch_size,
        overlap_switch=config.generation.overlap_switch,
        set_aside=set_aside,
    )
