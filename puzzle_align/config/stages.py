"""The registry of stages: what each trains, on which data.

Keys say by a row's properties which stages read them: no key names a stage. A new stage is a row
here and its phases in ``config.roles``, the section of its loss in ``JobConfig`` where it has one
of its own, and its page ``puzzle_align.stages.NAME`` with ``open_trainer(job, world)`` and
``outlook(config)``; and a module of checks, where it has checks of its own.
"""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class Stage:
    """A row of the registry."""

    trained: tuple[str, ...]  # roles that may be, the one that the stage is about first
    frozen: tuple[str, ...]  # roles that may take part besides
    data: Literal["pairs", "unpaired", "prompts"]
    loss: str  # the config's section of it
    checks: str  # module of its checks: ``stage_problems``, ``plan_problems``
    ranks_by_role: bool = False  # whether ``<role>.ranks`` place the models


_PREFERENCE_CHECKS = "puzzle_align.config.check_preference"
STAGES = {
    "dpo": Stage(
        trained=("actor",),
        frozen=("reference",),
        data="pairs",
        loss="dpo",
        checks=_PREFERENCE_CHECKS,
    ),
    "kto": Stage(
        trained=("actor",),
        frozen=("reference",),
        data="unpaired",
        loss="kto",
        checks=_PREFERENCE_CHECKS,
    ),
    "reward": Stage(
        trained=("reward",),
        frozen=(),
        data="pairs",
        loss="reward_loss",
        checks=_PREFERENCE_CHECKS,
    ),
    "ppo": Stage(
        trained=("actor", "critic"),
        frozen=("reference", "reward"),
        data="prompts",
        loss="ppo",
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
