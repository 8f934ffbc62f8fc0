"""Stage ``kto``: a policy learns from single responses, desirable or not, against a reference.

KTO's loss compares a response with the KL divergence of the policy from the reference. Phase ``kl``
estimates it before a step's training: both models run over mismatched rows, the batch's prompts
with one another's responses, in one pipeline if possible, else one after the other, or on separate
ranks.
"""

import time

import torch

from puzzle_align.algos.preference import kl_divergence
from puzzle_align.config.resolve import Job
from puzzle_align.data.loader import MismatchedLoader
from puzzle_align.runtime.batches import Batches, DataBatches
from puzzle_align.runtime.columns import Table
from puzzle_align.runtime.groups.collectives import sum_over_world
from puzzle_align.runtime.groups.world import World
from puzzle_align.stages.preference.trainer import PreferenceTrainer
from puzzle_align.telemetry import StepStats


class KTOTrainer(PreferenceTrainer):
    """KTO and similar losses, on one rank."""

    def __init__(self, job: Job, world: World) -> None:
        """Build everything. Collective over the world."""
        super().__init__(job, world)
        self._kl_phase = next((phase for phase in job.plan.phases if phase.name == "kl"), None)
        self._mismatched: dict[DataBatches, Batches] = {}
        if self._kl_phase is not None:
            longest, attention = job.config.data.max_length, self.trained.options.attention
            self._mismatched = {
                batches: Batches(MismatchedLoader(batches.loader, longest), attention, world.device)
                for batches in (self.batches, self._held_out)
                if batches is not None
            }

    def train_step(self, step: int) -> tuple[dict[str, float], StepStats]:
        """Train the policy on a global batch of responses."""
        started = time.monotonic()
        kl = self.estimate_kl(self.batches, step)
        estimated = time.monotonic() if self._mismatched else None
        # The reference's column, unless there is none or the rows have it (run a batch ahead).
        table = Table(by_response=self.run.fed(self.phase, self.batches, step))
        loss = self.loss_of(step, kl)
        self.run.train(self.phase, self.batches, step, {self.trained.role: loss}, table)
        metrics = self.update(step, loss)
        return metrics, self.stats(step, started, estimated)

    def estimate_kl(self, batches: DataBatches, step: int) -> float:
        """Estimate the policy's KL divergence on a step's mismatched responses. Collective."""
        if self._kl_phase is None:
            return 0.0
        mismatched = self._mismatched[batches]
        outputs = self.run.infer(self._kl_phase, mismatched, step)
        columns = []
        for role in ("actor", "reference"):
            column = outputs[role].by_response(batches.batch(step).num_examples, 1)
            columns.append((column[0] if column.dim() == 3 else column)[:, 0])
        # Each response is on one output rank of a model, zero elsewhere: the sum is the column.
        return kl_divergence(*sum_over_world(torch.stack(columns)))

    def prepare(self, step: int) -> None:
        """Prepare the mismatched rows of a step while the device computes."""
        if self._mismatched and step < self.num_steps:
            self._mismatched[self.batches].prepare(step)


# Read by ``stages.run``, which imports a stage by its name.
open_trainer = KTOTrainer
