"""Stage ``dpo``: a policy learns from preference pairs, against a frozen reference.

The plan decides where a step's phase ``train`` runs the reference: before the policy, a batch ahead
in the policy's pipeline bubbles, or a batch ahead on separate ranks. Losses without a reference,
and jobs whose reference is a table on disk, train the policy alone.
"""

import time

from puzzle_align.runtime.columns import Table
from puzzle_align.stages.preference.trainer import PreferenceTrainer
from puzzle_align.telemetry import StepStats


class DPOTrainer(PreferenceTrainer):
    """DPO and its family, on one rank."""

    def train_step(self, step: int) -> tuple[dict[str, float], StepStats]:
        """Train the policy on a global batch of pairs."""
        started = time.monotonic()
        # The reference's column, unless there is none or the rows have it (run a batch ahead).
        table = Table(by_response=self.run.fed(self.phase, self.batches, step))
        partners = self.partners(step, table) if self.objective.sorts_batch else None
        loss = self.loss_of(step, partners=partners)
        self.run.train(self.phase, self.batches, step, {self.trained.role: loss}, table)
        metrics = self.update(step, loss)
        return metrics, self.stats(step, started)


# Read by ``stages.run``, which imports a stage by its name.
open_trainer = DPOTrainer
