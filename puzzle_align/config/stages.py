"""The registry of stages: what each trains, and the phases of its iterations.

Keys say by a row's properties which stages read them: no key names a stage. A new stage is a row
here, the section of its loss in ``JobConfig`` where it has one of its own, and its page
``puzzle_align.stages.NAME`` with ``open_trainer(job, world)`` and ``outlook(config)``; and a module
of checks, where it has checks of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from puzzle_align.layout.job_plan import Workload

if TYPE_CHECKING:
    from puzzle_align.config.job import JobConfig
    from puzzle_align.config.sections.preference import ReferenceLossConfig


@dataclass(frozen=True)
class PhaseRoles:
    """Who works in a phase, in order; ``placement`` is what the config says of their turns."""

    name: str
    contexts: tuple[tuple[str, Workload], ...]
    placement: str = "sequential"  # auto | sequential | time_shared | concurrent
    once: bool = False  # before the first iteration


@dataclass(frozen=True, kw_only=True)
class Stage:
    """A row of the registry."""

    trained: tuple[str, ...]  # roles that may be, the one that the stage is about first
    frozen: tuple[str, ...]  # roles that may take part besides
    data: Literal["pairs", "unpaired", "prompts"]
    phases: Callable[[JobConfig], tuple[PhaseRoles, ...]]
    loss: str  # the config's section of it
    checks: str  # module of its checks: ``stage_problems(job, world_size)``
    ranks_by_role: bool = False  # whether ``<role>.ranks`` place the models


def _dpo(job: JobConfig) -> tuple[PhaseRoles, ...]:
    if not job.dpo.uses_reference:
        return (PhaseRoles("train", (("actor", "train"),)),)
    return _against_reference(job, job.dpo)


def _kto(job: JobConfig) -> tuple[PhaseRoles, ...]:
    phases = _against_reference(job, job.kto)
    if not job.kto.estimates_kl:
        return phases
    share = "sequential" if job.placement.reference == "sequential" else "auto"
    return (PhaseRoles("kl", (("reference", "infer"), ("actor", "infer")), share), *phases)


def _against_reference(job: JobConfig, loss: ReferenceLossConfig) -> tuple[PhaseRoles, ...]:
    if loss.precompute_ref_log_probs:
        before = PhaseRoles("precompute", (("reference", "infer"),), once=True)
        return before, PhaseRoles("train", (("actor", "train"),))
    both: tuple[tuple[str, Workload], ...] = (("reference", "infer"), ("actor", "train"))
    if loss.sequence_reason is not None and job.placement.reference == "auto":
        return (PhaseRoles("train", both, "sequential"),)
    return (PhaseRoles("train", both, job.placement.reference),)


def _reward(_job: JobConfig) -> tuple[PhaseRoles, ...]:
    return (PhaseRoles("train", (("reward", "train"),)),)


def _ppo(job: JobConfig) -> tuple[PhaseRoles, ...]:
    scoring = {
        "actor": job.ppo.recompute_log_probs,
        "reference": job.ppo.kl_coef > 0,
        "reward": job.reward.has_model,
        "critic": job.ppo.estimator.uses_critic,
    }
    roles = (role for role, takes_part in scoring.items() if takes_part)
    score: tuple[tuple[str, Workload], ...] = tuple((role, "infer") for role in roles)
    trained = ("actor", "critic") if job.ppo.estimator.uses_critic else ("actor",)
    learn: tuple[tuple[str, Workload], ...] = tuple((role, "train") for role in trained)
    phases = (
        PhaseRoles("generate", (("actor", "generate"),)),
        PhaseRoles("score", score, job.placement.score),
        PhaseRoles("learn", learn, job.placement.learn),
    )
    return tuple(phase for phase in phases if phase.contexts)  # functions alone may score


_PREFERENCE_CHECKS = "puzzle_align.config.check_preference"
STAGES = {
    "dpo": Stage(
        trained=("actor",),
        frozen=("reference",),
        data="pairs",
        loss="dpo",
        phases=_dpo,
        checks=_PREFERENCE_CHECKS,
    ),
    "kto": Stage(
        trained=("actor",),
        frozen=("reference",),
        data="unpaired",
        loss="kto",
        phases=_kto,
        checks=_PREFERENCE_CHECKS,
    ),
    "reward": Stage(
        trained=("reward",),
        frozen=(),
        data="pairs",
        loss="reward_loss",
        phases=_reward,
        checks=_PREFERENCE_CHECKS,
    ),
    "ppo": Stage(
        trained=("actor", "critic"),
        frozen=("reference", "reward"),
        data="prompts",
        loss="ppo",
        phases=_ppo,
        checks="puzzle_align.config.check_ppo",
        ranks_by_role=True,
    ),
}


def stages_with(*, role: str = "", data: str = "", loss: str = "") -> tuple[str, ...]:
    """The stages of whose row all this holds: a role may take part in it, and so on."""
    return tuple(
        name
        for name, stage in STAGES.items()
        if (not role or role in stage.trained + stage.frozen)
        and (not data or data == stage.data)
        and (not loss or loss == stage.loss)
    )


PREFERENCES = tuple(name for name, stage in STAGES.items() if stage.data != "prompts")
AGAINST_REFERENCE = tuple(name for name in PREFERENCES if "reference" in STAGES[name].frozen)
UNPAIRED = stages_with(data="unpaired")
PROMPTS = stages_with(data="prompts")
RANKS_BY_ROLE = tuple(name for name, stage in STAGES.items() if stage.ranks_by_role)
