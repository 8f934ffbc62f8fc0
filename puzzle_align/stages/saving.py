"""Save steps of a running job, and delete older checkpoints.

A failed step is not saved: a checkpoint that is due is saved at the next good step. An update's
loss is computed with the weights before it: a good update proves the previous checkpoint good, not
its own. So at least two checkpoints are kept, and none is deleted at a failed step.
"""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch

from puzzle_align.config.job import JobConfig
from puzzle_align.config.saved import checkpoint_paths
from puzzle_align.runtime.checkpoint.folder import delete_older
from puzzle_align.runtime.checkpoint.models import save_checkpoint
from puzzle_align.runtime.groups.collectives import (
    from_rank_zero,
    gather_everywhere,
    sum_over_world,
)
from puzzle_align.runtime.liveness.activity import activity
from puzzle_align.runtime.liveness.failure import CannotGoOn
from puzzle_align.stages.divergence import Divergence, Health, spoilt_weights
from puzzle_align.stages.inputs import checkpoint_folder
from puzzle_align.stages.trainer import Trainer

_FEWEST = 2  # checkpoints to keep: the last, and the one before, which a good update has proven


class Saving:
    """Checkpoints of a running job."""

    def __init__(self, trainer: Trainer, divergence: Divergence, origin: Mapping[str, Any]) -> None:
        """``origin``: values for ``job.json`` that are equal in all of the job's checkpoints."""
        self._trainer, self._divergence, self._origin = trainer, divergence, origin
        self._config, self._world = trainer.job.config, trainer.world
        self._folder = checkpoint_folder(self._config)
        self._is_due = False

    def end_step(self, done: int, asked: bool) -> bool:
        """Save step ``done`` (from 1) if due; return whether the job is to stop. Collective.

        Args:
            asked: whether this rank was asked to stop.

        Raises:
            CannotGoOn: if training diverges, or the run's folder was deleted.
        """
        levels = (Health.SKIPPED, Health.FAILING, Health.OVER)
        here = self._divergence.health
        stop, *reached = self._anywhere(asked, *(here >= level for level in levels))
        health = Health(sum(reached))
        ends = stop or done == self._trainer.num_steps
        if health == Health.OVER or (health == Health.FAILING and ends):
            # No rank sees all updates, and the rank that logs may see none.
            rank_causes = gather_everywhere(self._divergence.cause())
            causes = [cause for cause in rank_causes if cause is not None]
            raise CannotGoOn(f"{min(causes)[1]}; {self._last()}")
        self._is_due |= ends or due(done, self._config.checkpoint.save_every)
        if self._is_due and (ends or health == Health.GOOD):
            self.save(done)
            self._is_due = False
            if health == Health.GOOD:
                self._delete_older()
        return stop

    def save(self, step: int) -> None:
        """Save ``step``, if its weights are finite. Collective."""
        roles, models = tuple(self._trainer.plan.trained), self._trainer.models
        if spoilt := spoilt_weights(models, roles, self._world):
            what = f"step {step} left weights of the {' and '.join(spoilt)} not finite"
            raise CannotGoOn(f"{what}: {self._divergence.lower_rate(spoilt)}; {self._last()}")
        job = job_metadata(self._config, self._trainer, self._world.device, self._origin)
        with activity(f"saving step {step}"):
            from_rank_zero(self._check_there)
            save_checkpoint(self._folder, step, job, models)

    def _delete_older(self) -> None:
        """Delete checkpoints older than the last ``keep_last``. Collective."""
        keep_last = self._config.checkpoint.keep_last
        if keep_last > 0:
            with activity("deleting older checkpoints"):
                from_rank_zero(lambda: delete_older(self._folder, max(keep_last, _FEWEST)))

    def _anywhere(self, *flags: bool) -> list[bool]:
        """Combine ranks' flags by logical or. Collective over the world."""
        raised = torch.zeros(len(flags), device=self._world.device)
        for number, flag in enumerate(flags):
            raised[number].fill_(float(flag))  # on the device: no copy, and no wait
        return [count > 0 for count in sum_over_world(raised).tolist()]

    def _last(self) -> str:
        """Name, for an error, the checkpoint from which the job would resume."""
        paths = checkpoint_paths(self._folder)
        if not paths:
            return "no step was saved"
        line = f"the last checkpoint is {paths[-1]}"
        if len(paths) > 1:
            line += f"; if a run from it fails too, move it away to resume from {paths[-2].name}"
        return line

    def _check_there(self) -> None:
        """Raise CannotGoOn if the folder was deleted, instead of creating it again."""
        if not self._folder.is_dir():
            raise CannotGoOn(
                f"{self._folder} could not be written (No such file or directory): it was deleted"
                " while the job ran; run the same command again, and leave output_dir in place"
            )


def job_metadata(
    config: JobConfig, trainer: Trainer, device: torch.device, origin: Mapping[str, Any]
) -> dict[str, Any]:
    """Values of the job for a checkpoint's ``job.json``, beside the models."""
    return {
        **origin,
        "config": asdict(config),
        "data": trainer.data_fingerprint,
        "stop_token_ids": [*trainer.stop_token_ids],
        "skipped_steps": trainer.num_skipped,
        # One for all models; saved on CUDA, where timing may choose another when resuming.
        "attention": trainer.plan.contexts[0].options.attention if device.type == "cuda" else None,
        "state": trainer.state_dict(),
    }


def due(step: int, every: int) -> bool:
    """Whether ``step`` is a multiple of ``every``; never if that is 0."""
    return every > 0 and step % every == 0
