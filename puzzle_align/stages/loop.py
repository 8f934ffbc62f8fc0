"""The training loop of every stage: resume, step, evaluate, save, report."""

import logging
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path

from puzzle_align.config.job import JobConfig
from puzzle_align.config.resolve import Job
from puzzle_align.runtime.checkpoint.folder import locked, locked_output
from puzzle_align.runtime.groups.world import World
from puzzle_align.runtime.liveness.activity import phase, unhurried
from puzzle_align.stages.divergence import Divergence
from puzzle_align.stages.inputs import checkpoint_folder
from puzzle_align.stages.interruption import listening
from puzzle_align.stages.plan_report import PlanReport
from puzzle_align.stages.resuming import resume
from puzzle_align.stages.saving import Saving, due
from puzzle_align.stages.trainer import Trainer
from puzzle_align.stages.weights import Starts
from puzzle_align.telemetry import Telemetry, WaitCounter, open_telemetry

_logger = logging.getLogger(__name__)


def train(
    job: Job,
    trainer: Trainer,
    world: World,
    starts: Starts,
    report: PlanReport | None = None,
) -> None:
    """Run ``trainer`` to its last step, or until a signal asks to stop. Collective.

    Args:
        starts: the models' initial weights; a checkpoint that began with others is refused.
        report: compares the steps' times with a plan file's predictions.

    Raises:
        ValueError: if output_dir or the checkpoint folder cannot be written or is another run's,
            or holds a checkpoint that this job cannot resume from.
        CannotGoOn: if training diverges (``stages.divergence``); a diverged step is not saved.
    """
    config = job.config
    folder = checkpoint_folder(config)
    trainer.waits_between_phases = report is not None
    with locked_output(Path(config.output_dir)), locked(folder), listening() as interruption:
        start, origin = resume(job, trainer, starts)
        telemetry = _open_telemetry(config, trainer, world, start)
        counter = WaitCounter(world.device) if config.telemetry.host_waits else None
        divergence = Divergence(config, world.rank == 0)
        saving = Saving(config, trainer, world, divergence, origin, start)
        if start == 0:
            divergence.note_evaluation(0, _evaluate(trainer, telemetry, 0))
        for step in range(start, trainer.num_steps):
            counting = nullcontext({}) if counter is None else counter.counting()
            tracing = nullcontext() if trainer.tracer is None else trainer.tracer.step(step)
            with phase(f"training step {step + 1}"), counting as counted, tracing:
                metrics, stats = trainer.train_step(step)
            done = step + 1
            divergence.note(done, trainer.updates)
            telemetry.log(done, metrics | counted, stats)
            if report is not None:
                report.note(stats)
            last = done == trainer.num_steps
            if _samples_due(done, last, config.telemetry.sample_every):
                _show_samples(trainer, telemetry, done)
            if last or due(done, config.telemetry.eval_every):
                divergence.note_evaluation(done, _evaluate(trainer, telemetry, done))
            if saving.end_step(done, interruption.asked) and not last:
                _logger.warning("asked to stop: saved step %d; run again to resume from it", done)
                break
        with unhurried():  # uploads take their time
            telemetry.close({"skipped_steps": trainer.num_skipped})
        if report is not None:
            report.close()


def _open_telemetry(config: JobConfig, trainer: Trainer, world: World, start: int) -> Telemetry:
    return open_telemetry(
        config.telemetry,
        output_dir=Path(config.output_dir),
        rank=world.rank,
        world_size=world.size,
        device=world.device,
        num_steps=trainer.num_steps,
        resumed_step=start or None,
        settings=asdict(config),
    )


def _samples_due(step: int, last: bool, every: int) -> bool:
    """Whether a step shows samples: every so many, and the first and last; 0: never."""
    return every > 0 and (step == 1 or last or step % every == 0)


def _evaluate(trainer: Trainer, telemetry: Telemetry, step: int) -> dict[str, float]:
    """Evaluate and report; return the metrics, empty if there is no evaluation."""
    with phase(f"evaluation after step {step}"):
        metrics = trainer.evaluate()
    if metrics is not None:
        telemetry.eval(step, metrics)
    return metrics or {}


def _show_samples(trainer: Trainer, telemetry: Telemetry, step: int) -> None:
    samples = trainer.samples()
    if samples:
        telemetry.log_samples(step, samples)
