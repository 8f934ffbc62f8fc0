"""Stage ``reward``: a scalar head learns to put the chosen response above the rejected one."""

import time

from puzzle_align.config.job import JobConfig
from puzzle_align.config.resolve import Job
from puzzle_align.runtime.groups.world import World
from puzzle_align.stages.preference.outlook import PreferenceOutlook
from puzzle_align.stages.preference.trainer import PreferenceTrainer
from puzzle_align.telemetry import StepStats


class RewardTrainer(PreferenceTrainer):
    """Bradley-Terry on preference pairs, on one rank."""

    def train_step(self, step: int) -> tuple[dict[str, float], StepStats]:
        """Train the reward model on a global batch of pairs."""
        started = time.monotonic()
        loss = self.loss_of(step)
        self.run.train(
            self.phase, self.batches, step, {self.trained.role: loss}, self.table_of(step)
        )
        metrics = self.update(step, loss)
        return metrics, self.stats(step, started)


def open_trainer(job: Job, world: World) -> RewardTrainer:
    """Build this rank's trainer. Collective over the world.

    Raises:
        ValueError: one line, for bad data, weights or a tokenizer.
    """
    return RewardTrainer(job, world)


def outlook(config: JobConfig) -> PreferenceOutlook:
    """Describe the stage's work from its config and data, before anything runs."""
    return PreferenceOutlook(config)
