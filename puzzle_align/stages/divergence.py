"""Judge whether training can go on: count failed updates, see losses and weights not finite.

An update fails where its gradients are not finite (it is skipped then) or its loss is not. Weights
that a learning rate has thrown far off can still give a finite loss, and nothing to learn from: so
a step that ends with a failed update is not saved, and not a job's last. One skipped update alone
leaves the weights as they were, and does not take from a job that ends with it what it learnt. A
held-out loss that is not finite fails its own step alone.
"""

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum

import torch

from puzzle_align.config.job import JobConfig
from puzzle_align.config.roles import optimizer_config, trained_roles
from puzzle_align.runtime.checkpoint.models import Trained
from puzzle_align.runtime.groups.collectives import sum_over_world
from puzzle_align.runtime.groups.world import World

_logger = logging.getLogger(__name__)
_MOST = torch.finfo(torch.float32).max


@dataclass(frozen=True)
class Update:
    """An optimizer step of one model, made or skipped."""

    role: str
    moved: bool  # whether the weights did; they do not where the gradients are not finite
    loss: float
    grad_norm: float
    metrics: Mapping[str, float] = field(default_factory=dict)  # others of the same pass

    @property
    def failed(self) -> bool:
        """Whether nothing was learnt, or from a loss that float32 cannot hold."""
        return not self.moved or self.has_no_loss

    @property
    def has_no_loss(self) -> bool:
        """Whether float32 cannot hold the loss."""
        return not abs(self.loss) <= _MOST

    def __str__(self) -> str:
        others = {name: value for name, value in self.metrics.items() if name != "loss"}
        spoilt = [f"{name} {value}" for name, value in others.items() if not math.isfinite(value)]
        return ", ".join([f"loss {self.loss:.4g}, gradient norm {self.grad_norm:.4g}", *spoilt])


class Health(IntEnum):
    """How training goes after a step, from well to badly."""

    GOOD = 0
    SKIPPED = 1  # one update was skipped, its loss finite
    FAILING = 2  # several updates failed in a row, or a loss is not finite
    OVER = 3  # more failed in a row than the config lets pass


@dataclass
class _Streak:
    """Updates of one model that failed in a row."""

    step: int  # of the first, from 1
    first: Update
    length: int = 0


class Divergence:
    """Counts the updates that fail in a row; the same on all ranks that know of the updates."""

    def __init__(self, config: JobConfig, tells: bool) -> None:
        """``tells``: whether this rank warns of what fails."""
        self._tells = tells
        self._optimizers = {role: optimizer_config(config, role) for role in trained_roles(config)}
        # The critic may have its own.
        self._keys = {
            role: "optimizer" if settings is config.optimizer else f"{role}.optimizer"
            for role, settings in self._optimizers.items()
        }
        self._streaks: dict[str, _Streak] = {}
        self._evaluation: tuple[int, str] | None = None  # the step, if its failed, and how

    def note(self, step: int, updates: Sequence[Update]) -> None:
        """Count the updates of ``step`` (from 1), in order; warn of those that failed."""
        self._evaluation = None
        for update in updates:
            if not update.failed:
                self._streaks.pop(update.role, None)
                continue
            streak = self._streaks.setdefault(update.role, _Streak(step, update))
            streak.length += 1
            what = "has no finite loss" if update.moved else "was skipped"
            self._warn(
                f"step {step}: the {update.role}'s update {what} ({update}):"
                f" {streak.length} in a row ({self._limit(update.role)})"
            )

    def note_evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        """Note the evaluation after ``step``."""
        loss = metrics.get("loss", 0.0)
        if not math.isfinite(loss):
            line = f"the loss of the held-out data is {loss} at step {step}"
            self._evaluation = (step, f"{line}; {_cure('optimizer')}")
            self._warn(line)

    def lower_rate(self, roles: Sequence[str]) -> str:
        """The cure where these models' updates spoil their weights."""
        return f"lower {' and '.join(dict.fromkeys(f'{self._keys[role]}.lr' for role in roles))}"

    def _limit(self, role: str) -> str:
        limit = self._optimizers[role].max_skipped_steps
        return f"{self._keys[role]}.max_skipped_steps={limit}"

    def _warn(self, line: str) -> None:
        if self._tells:
            _logger.warning("%s", line)

    @property
    def health(self) -> Health:
        """How training goes, as far as this rank knows."""
        streaks = self._streaks
        if any(s.length > self._optimizers[r].max_skipped_steps for r, s in streaks.items()):
            return Health.OVER
        if self._evaluation or any(s.length > 1 or s.first.has_no_loss for s in streaks.values()):
            return Health.FAILING
        return Health.SKIPPED if streaks else Health.GOOD

    def cause(self) -> tuple[int, str] | None:
        """Since which step something fails, and what, for an error; None: nothing known here.

        Of several, the streak that began first; an evaluation comes after all of its step.
        """
        if not self._streaks:
            return self._evaluation
        role, streak = min(self._streaks.items(), key=lambda item: item[1].step)
        begun = f"its last {streak.length} updates, from step {streak.step} on"
        if streak.length == 1:
            begun = f"its last update, of step {streak.step}"
        return streak.step, (
            f"the {role} learns nothing any more: {begun}, failed ({streak.first};"
            f" {self._limit(role)}); {_cure(self._keys[role])}"
        )


def _cure(section: str) -> str:
    return (
        f"lower {section}.lr, or look at that step's data and at the weights that training began at"
    )


def spoilt_weights(models: Mapping[str, Trained], roles: Sequence[str], world: World) -> list[str]:
    """The roles whose weights are not finite on some rank. Collective over the world."""
    counts = torch.zeros(len(roles), device=world.device)
    for number, role in enumerate(roles):
        chunks = models[role].context.chunks if role in models else ()
        # Minima and maxima take no memory beside the weights, and NaN is both.
        ends = [end for c in chunks for p in c.parameters() for end in p.detach().aminmax()]
        if ends:
            counts[number] = (~torch.stack(ends).isfinite()).sum()
    return [role for role, bad in zip(roles, sum_over_world(counts).tolist(), strict=True) if bad]
