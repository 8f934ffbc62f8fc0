"""Stage ``reward``: a scalar head learns to put the chosen response above the rejected one."""

import time

from puzzle_align.runtime.columns import Table
from puzzle_align.stages.preference.trainer import PreferenceTrainer
from puzzle_align.telemetry import StepStats


class RewardTrainer(PreferenceTrainer):
    """Trainer of a reward model on one rank, on pairs or rankings."""

    def train_step(self, step: int) -> tuple[dict[str, float], StepStats]:
        """Train the reward model on a global batch of pairs or rankings."""
        started = time.monotonic()
        loss = self.loss_of(step)
        self.run.train(self.phase, self.batches, step, {self.trained.role: loss}, Table())
        metrics = self.update(step, loss)
        return metrics, self.stats(step, started)


# Read by ``stages.run``, which imports a stage by its name.
open_trainer = RewardTrainer
