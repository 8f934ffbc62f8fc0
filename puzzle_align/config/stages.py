"""The registry of stages: what each trains, the phases of its iterations, and where its code is.

A new stage is a row here and a package under ``puzzle_align.stages`` with the modules ``setup``
(``open_trainer(config, engine, world)``) and ``preview`` (what validation and pictures of the
schedule read); and a module of checks, where it has checks of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from puzzle_align.config.sections.models import RoleConfig
from puzzle_align.config.sections.preference import PREFERENCE_LOSSES, DPOConfig
from puzzle_align.layout.job_plan import Workload

if TYPE_CHECKING:
    from puzzle_align.config.job import JobConfig


@dataclass(frozen=True)
class PhaseRoles:
    """Who works in a phase, in order; ``placement`` is what the config says of their turns."""

    name: str
    contexts: tuple[tuple[str, Workload], ...]
    placement: str = "sequential"  # auto | sequential | time_shared | concurrent
    once: bool = False  # before the first iteration


@dataclass(frozen=True)
class Stage:
    """A row of the registry."""

    trained: tuple[str, ...]  # roles, the one that the stage is about first
    phases: Callable[[JobConfig], tuple[PhaseRoles, ...]]
    loss: str  # the config's section of it
    package: str  # of its code
    checks: str  # module of its checks: ``stage_problems(job, world_size)``
    ranks_by_role: bool = False  # whether ``<role>.ranks`` place the models


def uses_reference(dpo: DPOConfig) -> bool:
    """Whether the loss needs a reference model."""
    return PREFERENCE_LOSSES[dpo.loss_type].uses_reference and not dpo.reference_free


def has_model(role: RoleConfig) -> bool:
    """Whether the config gives the role a model of its own."""
    return role.model.path is not None or role.model.config is not None


def _dpo(job: JobConfig) -> tuple[PhaseRoles, ...]:
    if not uses_reference(job.dpo):
        return (PhaseRoles("train", (("actor", "train"),)),)
    if job.dpo.precompute_ref_log_probs:
        before = PhaseRoles("precompute", (("reference", "infer"),), once=True)
        return before, PhaseRoles("train", (("actor", "train"),))
    both: tuple[tuple[str, Workload], ...] = (("reference", "infer"), ("actor", "train"))
    return (PhaseRoles("train", both, job.placement.reference),)


def _reward(_job: JobConfig) -> tuple[PhaseRoles, ...]:
    return (PhaseRoles("train", (("reward", "train"),)),)


def _ppo(job: JobConfig) -> tuple[PhaseRoles, ...]:
    scoring = {
        "actor": job.ppo.recompute_log_probs,
        "reference": job.ppo.kl_coef > 0,
        "reward": has_model(job.reward),
        "critic": True,
    }
    roles = (role for role, takes_part in scoring.items() if takes_part)
    score: tuple[tuple[str, Workload], ...] = tuple((role, "infer") for role in roles)
    return (
        PhaseRoles("generate", (("actor", "generate"),)),
        PhaseRoles("score", score, job.placement.score),
        PhaseRoles("learn", (("actor", "train"), ("critic", "train")), job.placement.learn),
    )


_PREFERENCE = "puzzle_align.stages.preference"
_PREFERENCE_CHECKS = "puzzle_align.config.check_preference"
STAGES = {
    "dpo": Stage(("actor",), _dpo, "dpo", _PREFERENCE, _PREFERENCE_CHECKS),
    "reward": Stage(("reward",), _reward, "reward_loss", _PREFERENCE, _PREFERENCE_CHECKS),
    "ppo": Stage(
        ("actor", "critic"),
        _ppo,
        "ppo",
        "puzzle_align.stages.rl",
        "puzzle_align.config.check_ppo",
        ranks_by_role=True,
    ),
}
