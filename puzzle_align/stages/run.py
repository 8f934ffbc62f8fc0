"""A training job from its config to its last step."""

import logging
from importlib import import_module
from pathlib import Path

from puzzle_align.config.check import raise_first
from puzzle_align.config.job import JobConfig
from puzzle_align.config.resolve import Engine, Job, try_to_resolve
from puzzle_align.layout.groups import groups_of, num_streams
from puzzle_align.layout.job_plan import JobPlan
from puzzle_align.layout.model import AttentionBackend
from puzzle_align.planning.plan_file import GivenPlan
from puzzle_align.runtime.groups.collectives import from_rank_zero
from puzzle_align.runtime.groups.limits import allow_open_files, check_queues, files_needed
from puzzle_align.runtime.groups.world import (
    World,
    init_distributed,
    ranks_near,
    shutdown_distributed,
)
from puzzle_align.stages.attention import settle_attention
from puzzle_align.stages.inputs import check_folders, check_weights, to_resume
from puzzle_align.stages.loop import train
from puzzle_align.stages.plan_report import PlanReport
from puzzle_align.stages.resuming import attention_of
from puzzle_align.stages.setup import resolve_engine
from puzzle_align.stages.tokenizer import foreign_tokenizers
from puzzle_align.stages.weights import find_starts

_logger = logging.getLogger(__name__)


def run(config: JobConfig, plan: GivenPlan | None = None) -> None:
    """Train as the config says, on the ranks that torchrun started.

    Args:
        plan: a plan file to run by; its predictions are compared with measurements at the end.

    Raises:
        ValueError: for a fault of config, plan, data, weights or reward function, before training.
    """
    engine = resolve_engine(config.engine)
    raise_first(check_folders(config))
    timeouts = config.engine.distributed_timeout, config.reward.longest_call
    world = init_distributed(engine.device, *timeouts)
    # Another run may still write and delete checkpoints: one rank reads the folder for all.
    job, kept_attention = from_rank_zero(lambda: _resolve(config, engine, world.size, plan))
    _allow_open_files(job.plan, world)
    if world.device.type == "cuda":
        check_queues(num_streams(job.plan, world.rank))
    report = None
    if plan is not None:
        report = PlanReport(plan, world, Path(job.config.output_dir))
    job = settle_attention(job, world, kept_attention)
    starts = find_starts(job)
    stage = import_module(f"puzzle_align.stages.{job.config.stage}")
    train(job, stage.open_trainer(job, world), world, starts, report)
    shutdown_distributed()


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
    config: JobConfig, engine: Engine, world_size: int, plan: GivenPlan | None
) -> tuple[Job, AttentionBackend | None]:
    """Resolve and check the job; also return the resumed run's attention, if known."""
    saved = to_resume(config)
    chosen = None if plan is None else plan.chosen
    resolved = try_to_resolve(config, engine, world_size, chosen, saved)
    raise_first(resolved.problems)
    job = resolved.job
    assert job is not None, "nothing is wrong with it"
    raise_first(check_weights(job.models.values(), job.config))
    for line in resolved.kept:
        _logger.info("%s", line)
    for model in job.models.values():
        if model.source is not None and model.source.saved is not None:
            _logger.info("%s starts from %s", model.role, model.source)
    for line in foreign_tokenizers(job.tokenizer.path, job.models.values()):
        _logger.warning("%s", line)
    return job, None if saved is None else attention_of(saved)
