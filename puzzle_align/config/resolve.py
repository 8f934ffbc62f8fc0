"""A job resolved once: everything that its config says, as plain data that all parts read.

Rank 0 makes the ``Job`` and the other ranks get it: no path is opened, and no plan or model worked
out, a second time.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from puzzle_align.config.job import JobConfig
from puzzle_align.config.model_path import NamedModel, named_model
from puzzle_align.config.pinned import pin_models
from puzzle_align.config.placement import job_plan
from puzzle_align.config.roles import (
    optimizer_config,
    reference_loss,
    resolve_role_spec,
    role_model,
    role_names,
    trained_roles,
)
from puzzle_align.config.sections.data import TokenizerConfig
from puzzle_align.config.sections.optimizer import OptimizerConfig
from puzzle_align.config.sections.preference import ReferenceLossConfig
from puzzle_align.layout.job_plan import JobPlan, OptimizerStates, Settings
from puzzle_align.layout.model import AttentionBackend, ModelOptions, ModelSpec


@dataclass(frozen=True)
class Engine:
    """The engine section with every ``auto`` decided."""

    device: str  # cpu | cuda
    options: ModelOptions


@dataclass(frozen=True, kw_only=True)
class RoleModel:
    """The model of a role, and where its weights come from.

    Without ``files``, or where they are random, weights are drawn from the job's seed.
    """

    role: str
    key: str  # dotted name of the section that describes it: the actor's, of a reference without
    spec: ModelSpec  # with the head that the role needs
    files: NamedModel | None = None  # a Hugging Face directory, or a model of a checkpoint
    random_weights: bool = False
    optimizer: OptimizerConfig | None = None  # of a role that is trained

    @property
    def path(self) -> str | None:
        """The path of its files."""
        return None if self.files is None else str(self.files.path)

    @property
    def source(self) -> NamedModel | None:
        """The files that its weights are read from; None: they are drawn from the seed."""
        return None if self.random_weights else self.files


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
        """The job whose models compute attention so."""

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


def resolve(config: JobConfig, engine: Engine, world_size: int) -> Job:
    """The job on ``world_size`` ranks.

    Raises:
        ValueError: one line, if a path names no model, or a plan does not fit the ranks.
    """
    config = pin_models(config)
    return Job(
        config=config,
        plan=job_plan(config, engine.options, world_size),
        settings=job_settings(config, engine.device),
        engine=engine,
        models={role: resolve_model(config, role) for role in role_names(config)},
    )


def resolve_model(config: JobConfig, role: str) -> RoleModel:
    """A role's model. ValueError, one line, if there is none or it does not suit the role."""
    model, key = role_model(config, role)
    return RoleModel(
        role=role,
        key=key,
        spec=resolve_role_spec(config, role),
        files=None if model.path is None else named_model(model.path, key),
        random_weights=model.random_weights,
        optimizer=optimizer_config(config, role) if role in trained_roles(config) else None,
    )


def job_settings(config: JobConfig, device: str) -> Settings:
    """What of the config decides times and memory beside plans."""
    optimizers = {role: optimizer_config(config, role) for role in trained_roles(config)}
    set_aside: tuple[str, ...] = ()
    if config.generation.offload_optimizer:
        # On a CPU, the optimizer's state is where it would go to.
        set_aside = ("gradients", "optimizer") if device == "cuda" else ("gradients",)
    return Settings(
        row_tokens=config.packing.row_tokens,
        optimizers=OptimizerStates(
            sharded=frozenset(r for r, own in optimizers.items() if own.use_distributed_optimizer),
            small=frozenset(r for r, own in optimizers.items() if own.state_dtype == "bf16"),
            on_host=frozenset(r for r, own in optimizers.items() if own.cpu_offload),
        ),
        prefill_tokens=config.generation.prefill_tokens,
        decode_batch_size=config.generation.decode_batch_size,
        overlap_switch=config.generation.overlap_switch,
        set_aside=set_aside,
    )
