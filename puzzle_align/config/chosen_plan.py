"""A plan read from a file, in place of the plan that the config would give.

``with_plan`` replaces the keys that the plan decides; ``config.check_plan`` checks that the job
fits it: the same work in every phase, the same models, and sizes that divide them. A plan that
fits runs unchanged, even where no config could describe it.
"""

from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any

from puzzle_align.config.job import JobConfig
from puzzle_align.config.roles import ROLES
from puzzle_align.config.schema import is_among
from puzzle_align.config.sections.engine import FUSIONS
from puzzle_align.config.sections.models import PlacementConfig
from puzzle_align.config.stages import STAGES
from puzzle_align.files.messages import shown
from puzzle_align.layout.job_plan import JobPlan, Settings


@dataclass(frozen=True, kw_only=True)
class ChosenPlan:
    """A plan, its settings and its device (cpu or cuda); ``source`` names its file in errors."""

    source: str
    plan: JobPlan
    settings: Settings
    device: str

    def check_world_size(self, world_size: int) -> None:
        """Raise a one-line ValueError if the plan is for another number of ranks."""
        planned = self.plan.world_size
        if world_size != planned:
            raise ValueError(
                f"{self.source} is for {planned} ranks, and the job would have {world_size}: start "
                f"{planned}, or plan for {world_size}"
            )


def decided_keys(stage: str, roles: Iterable[str]) -> tuple[str, ...]:
    """The config's keys and sections that a plan for these roles decides."""
    keys = [f"engine.{name}" for name in ("device", "dtype", "attention", "transformer_impl")]
    keys += [f"engine.{name}" for name in FUSIONS]
    keys += ["packing.row_tokens", *(f"{role}.parallel" for role in roles)]
    if STAGES[stage].ranks_by_role:
        keys += [f"{role}.ranks" for role in roles]
        keys += ["placement.score", "placement.learn"]
        sizes = ("prefill_tokens", "decode_batch_size", "overlap_switch")
        keys += [f"generation.{name}" for name in ("parallel", "ranks", *sizes)]
    elif "reference" in roles:
        keys += ["placement.reference", f"{STAGES[stage].loss}.precompute_ref_log_probs"]
    return tuple(keys)


def refuse_overrides(overrides: Iterable[str], source: str, keys: Iterable[str]) -> None:
    """Raise a one-line ValueError if an override sets a key that ``source`` decides."""
    for override in overrides:
        name = override.partition("=")[0]
        for key in keys:
            if is_among(name, (key,)) or is_among(key, (name,)):
                text = shown(override)
                raise ValueError(
                    f"override '{text}': {source} decides '{key}'; leave the override out"
                )


def with_plan(config: JobConfig, chosen: ChosenPlan) -> JobConfig:
    """The config with the plan's settings, its ``parallel``, ``ranks`` and ``placement`` reset.

    A one-line ValueError if the plan is for another stage.
    """
    plan, settings = chosen.plan, chosen.settings
    if plan.stage != config.stage:
        raise ValueError(
            f"{chosen.source} is for stage {plan.stage}, and the job is of stage {config.stage}: "
            "name the config that was planned, or plan this job again"
        )
    options = plan.contexts[0].options
    engine = {
        "device": chosen.device,
        "dtype": options.dtype,
        "attention": options.attention,
        "transformer_impl": options.transformer_impl,
        **asdict(options.fusions),
    }
    changed: dict[str, Any] = {
        role: replace(getattr(config, role), parallel=None, ranks=None) for role in ROLES
    }
    changed["engine"] = replace(config.engine, **engine)
    changed["packing"] = replace(config.packing, row_tokens=settings.row_tokens)
    changed["placement"] = PlacementConfig(profile=config.placement.profile)
    if STAGES[config.stage].ranks_by_role:
        changed["generation"] = replace(
            config.generation,
            parallel=None,
            ranks=None,
            prefill_tokens=settings.prefill_tokens,
            decode_batch_size=settings.decode_batch_size,
            overlap_switch=settings.overlap_switch,
        )
    loss = config.reference_loss
    if loss is not None and "reference" in plan.models:
        before = any(phase.once for phase in plan.phases)
        changed[loss.section] = replace(loss, precompute_ref_log_probs=before)
    return replace(config, **changed)
