"""A training job: from its config to a trainer, and the trainer's loop to the last step."""

import logging
import signal
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from types import FrameType

from puzzle_align.config.check import raise_first
from puzzle_align.config.check_resumed import check_same_config
from puzzle_align.config.job import JobConfig
from puzzle_align.config.load import dump_job
from puzzle_align.config.resolve import Engine, Job, try_to_resolve
from puzzle_align.config.saved import Saved
from puzzle_align.files.messages import writing
from puzzle_align.layout.groups import groups_of, num_streams
from puzzle_align.layout.job_plan import JobPlan
from puzzle_align.layout.rank_order import torn_groups
from puzzle_align.planning.iteration import EVALUATE
from puzzle_align.planning.plan_file import GivenPlan
from puzzle_align.runtime.checkpoint.folder import locked
from puzzle_align.runtime.checkpoint.sharing import check_shared
from puzzle_align.runtime.groups.collectives import from_rank_zero, on_other_nodes
from puzzle_align.runtime.groups.limits import allow_open_files, check_queues, files_needed
from puzzle_align.runtime.groups.world import World, init_distributed, ranks_near
from puzzle_align.runtime.liveness.activity import activity, this_rank, unhurried
from puzzle_align.runtime.liveness.failure import keep_details_in
from puzzle_align.stages.banner import finished_lines, model_lines, output_lines, work_lines
from puzzle_align.stages.divergence import Divergence
from puzzle_align.stages.engine import resolve_engine, settle_attention
from puzzle_align.stages.inputs import (
    check_folders,
    check_seen,
    check_weights,
    checkpoint_folder,
    named_folders,
    to_resume,
)
from puzzle_align.stages.plan_report import PlanReport
from puzzle_align.stages.resuming import attention_of, resume
from puzzle_align.stages.saving import Saving, due
from puzzle_align.stages.tokenizer import foreign_tokenizers
from puzzle_align.stages.trainer import Trainer
from puzzle_align.stages.weights import Starts, find_starts
from puzzle_align.telemetry import Telemetry, WaitCounter

_STOP = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)  # ask the run to save and stop
_ANSWER = "stopping: after this step, which is saved (Ctrl-C again: at once, without)"
CONFIG = "config.yaml"  # in output_dir
_logger = logging.getLogger(__name__)
Opened = tuple[Trainer, Starts, Saved | None, PlanReport | None]  # arguments of ``train``


@contextmanager
def opened_run(config: JobConfig, plan: GivenPlan | None = None) -> Iterator[Opened]:
    """Open a job on the ranks that torchrun started, and hold its folders. Collective.

    Args:
        plan: a plan file to run by; its predictions are compared with measurements at the end.

    Raises:
        ValueError: for a fault of config, plan, data, weights or reward function, and as
            ``claimed``.
    """
    engine = resolve_engine(config.engine)
    keep_details_in(Path(config.output_dir))
    # Greedy responses are rewarded right after the sampled ones.
    longest_wait = config.reward.longest_wait(2 if config.ppo.estimator.samples_greedily else 1)
    timeouts = config.engine.distributed_timeout, longest_wait
    world = init_distributed(engine.device, *timeouts)
    # Ranks have met: before, a fault of one node would leave the others waiting for it.
    from_rank_zero(lambda: raise_first(check_folders(config)))
    on_other_nodes(lambda: raise_first(check_folders(config)))
    with claimed(config) as saved:
        job = from_rank_zero(lambda: _resolve(config, engine, world.size, plan, saved))
        folders = from_rank_zero(lambda: named_folders(job))
        on_other_nodes(lambda: check_seen(folders))
        _allow_open_files(job.plan, world)
        if world.device.type == "cuda":
            check_queues(num_streams(job.plan))
        report = None
        if plan is not None:
            report = PlanReport(plan, world, Path(config.output_dir))
        job = settle_attention(job, world, None if saved is None else attention_of(saved))
        _say(world, (*model_lines(job), f"output: {config.output_dir}"))
        starts = find_starts(job)
        stage = import_module(f"puzzle_align.stages.{config.stage}")
        trainer: Trainer = stage.open_trainer(job, world)
        if report is not None and trainer.seconds_before:
            report.note_beside("precompute", trainer.seconds_before)
        yield trainer, starts, saved, report


@contextmanager
def claimed(config: JobConfig) -> Iterator[Saved | None]:
    """Lock the job's folders during the block; yield the checkpoint to resume from. Collective.

    All nodes must share the folder of checkpoints. The checkpoint is looked up under the lock:
    another run, which may still be ending, can no longer save.

    Raises:
        ValueError: if output_dir or the checkpoint folder cannot be written or is another run's, a
            node does not share it, or the checkpoints do not fit ``checkpoint.resume``.
    """
    folder = checkpoint_folder(config)
    with locked(Path(config.output_dir), folder):
        if config.checkpoint.dir:
            check_shared(folder, "checkpoint.dir", folder)
        else:
            check_shared(folder, "output_dir", Path(config.output_dir))
        saved = from_rank_zero(lambda: to_resume(config))
        if saved is not None:
            on_other_nodes(lambda: check_seen({"checkpoint.resume": saved.path}))
        yield saved


def train(
    trainer: Trainer, starts: Starts, saved: Saved | None, report: PlanReport | None = None
) -> int | None:
    """Run ``trainer`` to its last step, or until a signal asks to stop. Collective.

    Args:
        starts: the models' initial weights; a checkpoint that began with others is refused.
        saved: the checkpoint to resume from, of ``claimed`` folders.
        report: compares the steps' times with a plan file's predictions.

    Returns:
        The signal, if one ended the run before its last step.

    Raises:
        ValueError: if this job cannot resume from the checkpoint.
        CannotGoOn: if training diverges (``stages.divergence``); a diverged step is not saved.
    """
    job, config, world = trainer.job, trainer.job.config, trainer.world
    trainer.waits_between_phases = report is not None
    with _stop_signals(shown=world.rank == 0) as asked_to_stop:
        resumed, origin = resume(job, trainer, starts, saved)
        if resumed == trainer.num_steps:
            _say(world, finished_lines(trainer))
            return None
        if world.rank == 0:
            # Not before: a run that is refused, or finished, leaves the config that trained.
            write_config(config)
        _say(world, work_lines(trainer, resumed))
        telemetry = _open_telemetry(trainer, resumed)
        counter = WaitCounter(world.device) if config.telemetry.host_waits else None
        divergence = Divergence(job, world.rank == 0)
        saving = Saving(trainer, divergence, origin)
        done, stops = resumed, False
        if resumed == 0:
            with _evaluation(0, report, telemetry, divergence) as metrics:
                metrics |= trainer.evaluate() or {}
        while done < trainer.num_steps and not stops:
            counting = nullcontext({}) if counter is None else counter.counting()
            tracing = nullcontext() if trainer.tracer is None else trainer.tracer.step(done)
            with activity(f"training step {done + 1}"), counting as counted, tracing:
                metrics, stats = trainer.train_step(done)
            done += 1
            this_rank.begin(f"the work after step {done}")  # unless evaluation or saving says more
            divergence.note(done, trainer.updates)
            telemetry.log(done, metrics | counted, stats)
            if report is not None:
                report.note(stats)
            _log_samples(done, trainer, telemetry)
            if done == trainer.num_steps or due(done, config.telemetry.eval_every):
                with _evaluation(done, report, telemetry, divergence) as metrics:
                    metrics |= trainer.evaluate() or {}
            stops = saving.end_step(done, bool(asked_to_stop))
        with unhurried():  # uploads take their time
            telemetry.close(output_lines(job, trainer.num_skipped))
        if report is not None:
            report.close()
    if done == trainer.num_steps:
        return None
    _say(world, [f"asked to stop: saved step {done}; run again to resume from it"])
    return asked_to_stop[0] if asked_to_stop else signal.SIGTERM  # of another rank


def _say(world: World, lines: Iterable[str]) -> None:
    """Log lines on rank 0; they are not made on others."""
    for line in lines if world.rank == 0 else ():
        _logger.info("%s", line)


@contextmanager
def _evaluation(
    step: int, report: PlanReport | None, telemetry: Telemetry, divergence: Divergence
) -> Iterator[dict[str, float]]:
    """Name the evaluation after a step (0: before training); time it, and report its metrics."""
    started, metrics = time.monotonic(), dict[str, float]()
    with activity(f"evaluation after step {step}" if step else "evaluation before training"):
        yield metrics
    if report is not None:
        report.note_beside(EVALUATE, time.monotonic() - started)
    if metrics:  # not on every rank, and not without held-out data
        telemetry.eval(step, metrics)
    divergence.note_evaluation(step, metrics)


def _log_samples(step: int, trainer: Trainer, telemetry: Telemetry) -> None:
    """Log some responses of the first step, the last, and those that are due."""
    every = trainer.job.config.telemetry.sample_every
    is_due = step in (1, trainer.num_steps) or due(step, every)
    if every > 0 and is_due and (samples := trainer.samples()):
        telemetry.log_samples(step, samples)


def write_config(config: JobConfig) -> None:
    """Write a job's config into its ``output_dir``, with every key that its stage reads."""
    path = Path(config.output_dir) / CONFIG
    with writing(path):
        path.write_text(f"# This folder's job: --config {path}\n{dump_job(config)}", "utf-8")


@contextmanager
def _stop_signals(*, shown: bool) -> Iterator[list[int]]:
    """Collect signals that ask to stop while the block runs, instead of ending the process.

    A second Ctrl-C ends it at once.

    Args:
        shown: whether to answer Ctrl-C on the screen.
    """
    received: list[int] = []

    def note(number: int, _frame: FrameType | None) -> None:
        received.append(number)
        if number == signal.SIGINT:
            for ending in (signal.SIGINT, signal.SIGTERM):  # torchrun passes on a second as SIGTERM
                signal.signal(ending, signal.SIG_DFL)
            if shown:
                _logger.info("%s", _ANSWER)

    handlers = {number: signal.signal(number, note) for number in _STOP}
    try:
        yield received
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _allow_open_files(plan: JobPlan, world: World) -> None:
    """Raise the limit of open files for the plan's groups; ValueError, one line, if impossible."""
    on_device = world.device.type == "cuda"  # then links between ranks are on the device
    sizes = [
        len(group.ranks)
        for group in groups_of(plan, world.rank)
        if not (group.is_link and on_device) and len(group.ranks) < world.size
    ]
    allow_open_files(files_needed(world.size, ranks_near(world.size), sizes))


def _resolve(
    config: JobConfig,
    engine: Engine,
    world_size: int,
    plan: GivenPlan | None,
    saved: Saved | None,
) -> Job:
    """Resolve and check the job; log the models' sources."""
    resolved = try_to_resolve(config, engine, world_size, plan, saved)
    raise_first(resolved.problems)
    job = resolved.job
    assert job is not None, "nothing is wrong with it"
    raise_first(check_weights(job.models.values(), job.config))
    if saved is not None and saved.has_optimizers:
        check_same_config(job.config, saved)
    for line in resolved.kept:
        _logger.info("%s", line)
    torn = torn_groups(job.plan, engine.ranks_per_node)
    for line in (*foreign_tokenizers(job.tokenizer.path, job.models.values()), *torn):
        _logger.warning("%s", line)
    return job


def _open_telemetry(trainer: Trainer, resumed: int) -> Telemetry:
    config, world = trainer.job.config, trainer.world
    return Telemetry(
        config.telemetry,
        output_dir=Path(config.output_dir),
        rank=world.rank,
        world_size=world.size,
        device=world.device,
        num_steps=trainer.num_steps,
        resumed_step=resumed or None,
        settings=asdict(config),
    )
