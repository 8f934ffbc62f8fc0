"""The roles of a job, and the model and parallel plan that the config gives each."""

from puzzle_align.config.job import JobConfig
from puzzle_align.config.model_path import named_model, resolve_tokenizer
from puzzle_align.config.sections.data import TokenizerConfig
from puzzle_align.config.sections.models import ModelConfig, ParallelConfig, RoleConfig
from puzzle_align.config.sections.optimizer import OptimizerConfig
from puzzle_align.config.sections.preference import ReferenceLossConfig
from puzzle_align.config.stages import STAGES
from puzzle_align.layout.hf_config import from_hf_config
from puzzle_align.layout.model import ModelSpec, with_scalar_head

ROLES = ("actor", "reference", "reward", "critic")
_SCALAR_ROLES = ("reward", "critic")  # models that give a number in place of logits


def reference_loss(job: JobConfig) -> ReferenceLossConfig | None:
    """The loss of a stage that holds a policy against a reference; None of other stages."""
    loss = getattr(job, STAGES[job.stage].loss)
    return loss if isinstance(loss, ReferenceLossConfig) else None


def phase_roles(job: JobConfig, phase: str) -> tuple[str, ...]:
    """The roles at work in a phase, in order; none where the job has no such phase."""
    found = (own for own in STAGES[job.stage].phases(job) if own.name == phase)
    return tuple(role for own in found for role, _ in own.contexts)


def trained_roles(job: JobConfig) -> tuple[str, ...]:
    """The roles whose models the stage trains, the one it is about first."""
    stage = STAGES[job.stage]
    trained = {
        role for phase in stage.phases(job) for role, work in phase.contexts if work == "train"
    }
    return tuple(role for role in stage.trained if role in trained)


def trained_role(job: JobConfig) -> str:
    """The role that the stage is about."""
    return trained_roles(job)[0]


def fp8_of(job: JobConfig, role: str) -> str | None:
    """The format of the products of a role's layers, where they are in FP8."""
    named = job.engine.fp8_roles
    if named is None:
        named = trained_role(job)
    return job.engine.fp8 if role in ([named] if isinstance(named, str) else named) else None


def role_names(job: JobConfig) -> tuple[str, ...]:
    """The roles that take part, the trained ones first."""
    working = (role for own in STAGES[job.stage].phases(job) for role, _ in own.contexts)
    return tuple(dict.fromkeys([*trained_roles(job), *working]))


def role_model(job: JobConfig, role: str) -> tuple[ModelConfig, str]:
    """A role's model and the dotted key of it.

    A reference without one has the actor's; a critic the reward model's, or else the actor's.
    """
    own: RoleConfig = getattr(job, role)
    if role in ("reference", "critic") and not own.has_model:
        heir = "reward" if role == "critic" and job.reward.has_model else "actor"
        return getattr(job, heir).model, f"{heir}.model"
    return own.model, f"{role}.model"


def role_parallel(job: JobConfig, role: str) -> tuple[ParallelConfig, str]:
    """A role's plan and the dotted key of it; where it has none: that of the stage's first role."""
    own: ParallelConfig | None = getattr(job, role).parallel
    if own is None and role not in ("actor", trained_role(job)):
        return role_parallel(job, "actor")
    return own or ParallelConfig(), f"{role}.parallel"


def resolve_role_spec(job: JobConfig, role: str) -> ModelSpec:
    """A role's dimensions, with the head that the role needs.

    Raises:
        ValueError: as ``resolve_spec``; or a reward model is given for a policy, or a language
            model as the reward model of stage ppo, where its head would never be trained.
    """
    model, key = role_model(job, role)
    spec = resolve_spec(model, key)
    if role in _SCALAR_ROLES:
        has_weights = model.path is not None and not model.random_weights
        if (
            "reward" not in trained_roles(job)
            and key == "reward.model"
            and has_weights
            and spec.head != "scalar"
        ):
            raise ValueError(
                f"{key}.path: {model.path} is a language model, which has no trained reward head; "
                "train one with stage=reward and give its checkpoint"
            )
        return with_scalar_head(spec)
    if spec.head != "lm":
        raise ValueError(
            f"{key}: a sequence classifier gives no next-token logits; give a language model"
        )
    return spec


def resolve_spec(model: ModelConfig, key: str) -> ModelSpec:
    """A model's dimensions: of what its path names where it has one, else of the inline config.

    Args:
        key: dotted name of ``model``, for errors.

    Raises:
        ValueError: there is neither, or it is not readable, or not supported.
    """
    if model.path is None:
        if model.config is None:
            raise ValueError(
                f"{key}: no model; set {key}.path to a Hugging Face directory or a checkpoint, or "
                f"give {key}.config"
            )
        return from_hf_config(model.config, f"{key}.config")
    return named_model(model.path, key).spec


def optimizer_config(config: JobConfig, role: str) -> OptimizerConfig:
    """A trained role's optimizer: the critic may have its own."""
    own = config.critic.optimizer if role == "critic" else None
    return config.optimizer if own is None else own


def tokenizer_config(job: JobConfig) -> TokenizerConfig:
    """The job's tokenizer, its path filled in where there is one; ValueError as ``resolve_spec``.

    Of a model that the job trains, the first: from its directory, or as its checkpoint says.
    """
    return resolve_tokenizer(job.tokenizer, *role_model(job, trained_role(job)))
