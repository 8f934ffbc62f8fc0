"""Detect divergence: count failed updates, and find losses and weights that are not finite.

An update fails if its gradients are not finite (then it is skipped) or its loss is not finite.
Weights spoilt by a high learning rate may still give a finite loss without any useful gradient: so
a step that ends with a failed update is not saved, and a job cannot end with it. A single skipped
update leaves the weights unchanged: a job may end with it and is saved. A held-out loss that is not
finite fails only its step.
"""

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING

import torch

from puzzle_align.config.resolve import Job
from puzzle_align.files.typed import LARGEST_FP32
from puzzle_align.runtime.groups.collectives import sum_over_world
from puzzle_align.runtime.groups.world import World

if TYPE_CHECKING:
    from puzzle_align.runtime.checkpoint.models import Trained

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Update:
    """An optimizer step of one model, made or skipped."""

    role: str
    moved: bool  # whether the weights changed; false if the gradients are not finite
    loss: float
    grad_norm: float
    metrics: Mapping[str, float] = field(default_factory=dict)  # other metrics of the same pass

    @property
    def failed(self) -> bool:
        """Whether the update was skipped, or its loss overflows float32."""
        return not self.moved or self.has_no_loss

    @property
    def has_no_loss(self) -> bool:
        """Whether the loss is not finite in float32."""
        return not abs(self.loss) <= LARGEST_FP32

    def __str__(self) -> str:
        others = {name: value for name, value in self.metrics.items() if name != "loss"}
        spoilt = [f"{name} {value}" for name, value in others.items() if not math.isfinite(value)]
        return ", ".join([f"loss {self.loss:.4g}, gradient norm {self.grad_norm:.4g}", *spoilt])


class Health(IntEnum):
    """State of training after a step, from good to bad."""

    GOOD = 0
    SKIPPED = 1  # one update was skipped, its loss finite
    FAILING = 2  # several updates failed in a row, or a loss is not finite
    OVER = 3  # more failed in a row than the config allows


@dataclass
class _Streak:
    """Updates of one model that failed in a row."""

    step: int  # step of the first one, from 1
    first: Update
    length: int = 0


class Divergence:
    """Counts updates that fail in a row; equal on all ranks that see the updates."""

    def __init__(self, job: Job, logs: bool) -> None:
        """``logs``: whether this rank logs failures."""
        self._logs = logs
        self._optimizers = {role: job.optimizer(role) for role in job.plan.trained}
        # The critic may have a separate optimizer section.
        self._keys = {
            role: "optimizer" if settings is job.config.optimizer else f"{role}.optimizer"
            for role, settings in self._optimizers.items()
        }
        self._streaks: dict[str, _Streak] = {}
        # Step of a failed evaluation, and the reason.
        self._evaluation: tuple[int, str] | None = None

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
        """Advice for an error if updates make the weights of these models not finite."""
        return f"lower {' and '.join(dict.fromkeys(f'{self._keys[role]}.lr' for role in roles))}"

    def _limit(self, role: str) -> str:
        limit = self._optimizers[role].max_skipped_steps
        return f"{self._keys[role]}.max_skipped_steps={limit}"

    def _warn(self, line: str) -> None:
        if self._logs:
            _logger.warning("%s", line)

    @property
    def health(self) -> Health:
        """State of training, as far as this rank knows."""
        streaks = self._streaks
        if any(s.length > self._optimizers[r].max_skipped_steps for r, s in streaks.items()):
            return Health.OVER
        if self._evaluation or any(s.length > 1 or s.first.has_no_loss for s in streaks.values()):
            return Health.FAILING
        return Health.SKIPPED if streaks else Health.GOOD

    def cause(self) -> tuple[int, str] | None:
        """First failed step and a line for the error; None if this rank knows of no failure.

        The earliest streak counts; an evaluation comes after the updates of its step.
        """
        if not self._streaks:
            return self._evaluation
        role, streak = min(self._streaks.items(), key=lambda item: item[1].step)
        updates = f"its last {streak.length} updates, from step {streak.step} on"
        if streak.length == 1:
            updates = f"its last update, of step {streak.step}"
        return streak.step, (
            f"the {role} learns nothing any more: {updates}, failed ({streak.first};"
            f" {self._limit(role)}); {_cure(self._keys[role])}"
        )


def _cure(section: str) -> str:
    return f"lower {section}.lr, or look at that step's data and at the job's initial weights"


def spoilt_weights(
    models: Mapping[str, "Trained"], roles: Sequence[str], world: World
) -> list[str]:
    """Find the roles whose weights are not finite on some rank. Collective over the world."""
    counts = torch.zeros(len(roles), device=world.device)
    for number, role in enumerate(roles):
        chunks = models[role].context.chunks if role in models else ()
        # Minima and maxima need no memory beside the weights, and propagate NaN.
        ends = [end for c in chunks for p in c.parameters() for end in p.detach().aminmax()]
        if ends:
            counts[number] = (~torch.stack(ends).isfinite()).sum()
    return [role for role, bad in zip(roles, sum_over_world(counts).tolist(), strict=True) if bad]
