"""The registry of stages: the models each trains, and its data.

Config keys select the stages that read them by properties of these rows, never by name. To add a
stage: a row here; its phases in ``config.roles``; a module ``puzzle_align.stages.NAME`` with
``open_trainer(job, world)`` (its outlook and checks are those of its kind of data:
``stages.outlook``, ``config.check``); if needed, a section for its loss in ``JobConfig``.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal


@dataclass(frozen=True, kw_only=True)
class Stage:
    """A row of the registry."""

    trained: tuple[str, ...]  # roles that may be trained, the main one first
    frozen: tuple[str, ...]  # other roles that may take part
    data: Literal["pairs", "unpaired", "prompts"]
    loss: str  # name of the loss's config section
    ranks_by_role: bool = False  # whether ``<role>.ranks`` place the models
    defaults: Mapping[str, Any] = field(default_factory=dict)  # of keys, where not the key's own


_PROMPTS = Stage(
    trained=("actor", "critic"),
    frozen=("reference", "reward"),
    data="prompts",
    loss="ppo",
    ranks_by_role=True,
)
STAGES = {
    "dpo": Stage(trained=("actor",), frozen=("reference",), data="pairs", loss="dpo"),
    "kto": Stage(trained=("actor",), frozen=("reference",), data="unpaired", loss="kto"),
    "reward": Stage(trained=("reward",), frozen=(), data="pairs", loss="reward_loss"),
    "ppo": _PROMPTS,
    "grpo": replace(
        _PROMPTS,
        defaults={  # as in verl's examples of GRPO, with TRL's number of generations
            "generation.num_generations": 8,
            "ppo.advantage_estimator": "grpo",
            "ppo.whiten_advantages": False,
            "ppo.use_kl_loss": True,
            "ppo.kl_estimator": "k3",
            "ppo.kl_coef": 0.001,
        },
    ),
}


def stages_with(*, role: str = "", data: str = "", loss: str = "") -> tuple[str, ...]:
    """The stages with this role, kind of data and loss section; empty: any."""
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
