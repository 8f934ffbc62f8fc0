"""The roles and phases of a job, and the config sections that each role reads."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from puzzle_align.config.job import JobConfig
from puzzle_align.config.sections.models import LoraConfig, ModelConfig, ParallelConfig, RoleConfig
from puzzle_align.config.sections.optimizer import OptimizerConfig
from puzzle_align.config.sections.preference import ReferenceLossConfig
from puzzle_align.config.stages import STAGES
from puzzle_align.layout.job_plan import Workload

ROLES = ("actor", "reference", "reward", "critic")


@dataclass(frozen=True)
class PhaseRoles:
    """A phase's contexts, in order; ``placement`` is the config's value for ``key``."""

    name: str
    contexts: tuple[tuple[str, Workload], ...]
    placement: str = "sequential"  # auto | sequential | time_shared | concurrent
    key: str = ""
    once: bool = False  # before the first iteration


def job_phases(config: JobConfig) -> tuple[PhaseRoles, ...]:
    """The phases of a step or iteration, in order."""
    return _PHASES[config.stage](config)


def _dpo(config: JobConfig) -> tuple[PhaseRoles, ...]:
    if not config.dpo.uses_reference:
        return (PhaseRoles("train", (("actor", "train"),)),)
    return _against_reference(config, config.dpo)


def _kto(config: JobConfig) -> tuple[PhaseRoles, ...]:
    phases = _against_reference(config, config.kto)
    if not config.kto.estimates_kl:
        return phases
    share = "sequential" if config.placement.reference == "sequential" else "auto"
    return (PhaseRoles("kl", (("reference", "infer"), ("actor", "infer")), share), *phases)


def _against_reference(config: JobConfig, loss: ReferenceLossConfig) -> tuple[PhaseRoles, ...]:
    if loss.precompute_ref_log_probs:
        before = PhaseRoles("precompute", (("reference", "infer"),), once=True)
        return before, PhaseRoles("train", (("actor", "train"),))
    both: tuple[tuple[str, Workload], ...] = (("reference", "infer"), ("actor", "train"))
    placement = config.placement.reference
    if loss.sequence_reason is not None and placement == "auto":
        placement = "sequential"
    return (PhaseRoles("train", both, placement, "placement.reference"),)


def _reward(_config: JobConfig) -> tuple[PhaseRoles, ...]:
    return (PhaseRoles("train", (("reward", "train"),)),)


def _ppo(config: JobConfig) -> tuple[PhaseRoles, ...]:
    scoring = {
        "actor": config.ppo.recompute_log_probs,
        "reference": config.ppo.kl_coef > 0,
        "reward": config.reward.has_model,
        "critic": config.ppo.estimator.uses_critic,
    }
    score: tuple[tuple[str, Workload], ...] = tuple(
        (role, "infer") for role, takes_part in scoring.items() if takes_part
    )
    trained = ("actor", "critic") if config.ppo.estimator.uses_critic else ("actor",)
    learn: tuple[tuple[str, Workload], ...] = tuple((role, "train") for role in trained)
    phases = (
        PhaseRoles("generate", (("actor", "generate"),)),
        PhaseRoles("score", score, config.placement.score, "placement.score"),
        PhaseRoles("learn", learn, config.placement.learn, "placement.learn"),
    )
    return tuple(phase for phase in phases if phase.contexts)  # no score: functions alone reward


_PHASES: dict[str, Callable[[JobConfig], tuple[PhaseRoles, ...]]] = {
    "dpo": _dpo,
    "kto": _kto,
    "reward": _reward,
    "ppo": _ppo,
    "grpo": _ppo,
}
assert {*_PHASES} == {*STAGES}


def trained_in(stage: str, phases: Iterable[PhaseRoles]) -> tuple[str, ...]:
    """The roles that the phases train, the stage's main role first."""
    trained = {role for p in phases for role, workload in p.contexts if workload == "train"}
    return tuple(role for role in STAGES[stage].trained if role in trained)


def fp8_of(config: JobConfig, role: str) -> str | None:
    """The FP8 format of a role's matrix products; None: not in FP8."""
    named = config.engine.fp8_roles
    if named is None:
        named = config.main_role
    return config.engine.fp8 if role in ([named] if isinstance(named, str) else named) else None


def role_model(config: JobConfig, role: str) -> tuple[ModelConfig, str]:
    """A role's model and its dotted key.

    By default a reference has the actor's, a critic the reward model's or else the actor's. A role
    with a ``base`` has that role's.
    """
    owner = _model_owner(config, role)
    return getattr(config, owner).model, f"{owner}.model"


def role_lora(config: JobConfig, role: str) -> tuple[LoraConfig | None, str]:
    """A role's adapters and their dotted key.

    A reference or critic without a model of its own has the adapters that its donor starts from
    (the actor; of a critic, the reward model if there is one), not those that the donor trains.
    """
    section: RoleConfig = getattr(config, role)
    donor, key = _donor(config, role), f"{role}.lora"
    if section.lora is not None or donor is None:
        return section.lora, key
    lora, key = role_lora(config, donor)
    return (lora, key) if lora is not None and lora.path is not None else (None, key)


def _donor(config: JobConfig, role: str) -> str | None:
    """The role whose model a role without one of its own starts from; None: it has its own."""
    if role not in ("reference", "critic") or getattr(config, role).has_model:
        return None
    return "reward" if role == "critic" and config.reward.has_model else "actor"


def _model_owner(config: JobConfig, role: str) -> str:
    """The role whose section names the weights of a role's model."""
    other = getattr(config, role).base or _donor(config, role)
    return role if other in (None, role) else _model_owner(config, other)


def role_parallel(config: JobConfig, role: str) -> tuple[ParallelConfig, str]:
    """A role's plan and its dotted key; a role without a plan has the actor's."""
    parallel: ParallelConfig | None = getattr(config, role).parallel
    if parallel is None and role not in ("actor", config.main_role):
        return role_parallel(config, "actor")
    return parallel or ParallelConfig(), f"{role}.parallel"


def optimizer_config(config: JobConfig, role: str) -> OptimizerConfig:
    """A trained role's optimizer; the critic's may differ."""
    if role == "critic" and config.critic.optimizer is not None:
        return config.critic.optimizer
    return config.optimizer
