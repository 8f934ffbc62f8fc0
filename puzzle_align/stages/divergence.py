"""Whether training can go on: updates that failed in a row, losses and weights that are not finite.

What is saved has been seen to work: a step whose update was skipped, or whose loss is not finite,
is neither saved nor a job's last. (Gradients may overflow while the loss still looks well: weights
that a learning rate has thrown far off can give a finite loss, and nothing to learn from.)
"""

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from puzzle_align.config.job import JobConfig
from puzzle_align.config.resolve import optimizer_config, trained_roles
from puzzle_align.runtime.checkpoint import Trained
from puzzle_align.runtime.groups import World
from puzzle_align.runtime.reduce import sum_over_world

_logger = logging.getLogger(__name__)
_MOST = torch.finfo(torch.float32).max
_CURE = "lower optimizer.lr, or look at that step's data and at the weights that training began at"


@dataclass(frozen=True)
class Update:
    """What became of an optimizer step of one model."""

    role: str
    moved: bool  # whether the weights did; they do not where the gradients are not finite
    loss: float
    grad_norm: float
    metrics: Mapping[str, float] = field(default_factory=dict)  # others of the same pass

    @property
    def failed(self) -> bool:
        """Whether nothing was learnt, or from a loss that float32 cannot hold."""
        return not (self.moved and abs(self.loss) <= _MOST)

    def __str__(self) -> str:
        others = {name: value for name, value in self.metrics.items() if name != "loss"}
        spoilt = [f"{name} {value}" for name, value in others.items() if not math.isfinite(value)]
        return ", ".join([f"loss {self.loss:.4g}, gradient norm {self.grad_norm:.4g}", *spoilt])


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
        self._limits = {
            role: optimizer_config(config, role).max_skipped_steps for role in trained_roles(config)
        }
        self._streaks: dict[str, _Streak] = {}
        self._evaluation = ""  # what is wrong with this step's

    def note(self, step: int, updates: Sequence[Update]) -> None:
        """Take what became of the updates of ``step`` (from 1), in order; warn of what failed."""
        self._evaluation = ""
        for update in updates:
            if not update.failed:
                self._streaks.pop(update.role, None)
                continue
            streak = self._streaks.setdefault(update.role, _Streak(step, update))
            streak.length += 1
            limit = f"optimizer.max_skipped_steps={self._limits[update.role]}"
            what = "has no finite loss" if update.moved else "was skipped"
            self._warn(
                f"step {step}: the {update.role}'s update {what} ({update}):"
                f" {streak.length} in a row ({limit})"
            )

    def note_evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        """Take an evaluation after ``step``."""
        loss = metrics.get("loss", 0.0)
        if not math.isfinite(loss):
            self._evaluation = f"the loss of the held-out data is {loss} at step {step}"
            self._warn(self._evaluation)

    def _warn(self, line: str) -> None:
        if self._tells:
            _logger.warning("%s", line)

    @property
    def is_failing(self) -> bool:
        """Whether the last update, or the last step's evaluation, failed."""
        return bool(self._streaks or self._evaluation)

    @property
    def is_over(self) -> bool:
        """Whether more updates failed in a row than the config lets pass."""
        return any(s.length > self._limits[role] for role, s in self._streaks.items())

    def explain(self) -> str:
        """What is failing, for an error: the streak that began first, else the evaluation."""
        if not self._streaks:
            return f"{self._evaluation or 'another rank says why'}; {_CURE}"
        role, streak = min(self._streaks.items(), key=lambda item: item[1].step)
        begun = f"its last {streak.length} updates, from step {streak.step} on"
        if streak.length == 1:
            begun = f"its last update, of step {streak.step}"
        return (
            f"the {role} learns nothing any more: {begun}, failed ({streak.first};"
            f" optimizer.max_skipped_steps={self._limits[role]}); {_CURE}"
        )


def spoilt_weights(models: Mapping[str, Trained], roles: Sequence[str], world: World) -> list[str]:
    """Those of ``roles`` whose weights are not finite on some rank. Collective over the world."""
    found = torch.zeros(len(roles), device=world.device)
    for number, role in enumerate(roles):
        chunks = models[role].context.chunks if role in models else ()
        # Minima and maxima take no memory beside the weights, and NaN is both.
        ends = [end for c in chunks for p in c.parameters() for end in p.detach().aminmax()]
        if ends:
            found[number] = (~torch.stack(ends).isfinite()).sum()
    return [role for role, bad in zip(roles, sum_over_world(found).tolist(), strict=True) if bad]
