"""A training job from its config to its last step."""

import logging
from importlib import import_module
from pathlib import Path

from puzzle_align.config.check import check_job, raise_first
from puzzle_align.config.job import JobConfig
from puzzle_align.config.model_path import named_model
from puzzle_align.config.pinned import keep_models, names_checkpoints, pin_models
from puzzle_align.config.resolve import role_model, role_names
from puzzle_align.config.stages import STAGES
from puzzle_align.layout.groups import groups_of, num_streams
from puzzle_align.layout.job_plan import JobPlan
from puzzle_align.layout.model import AttentionBackend
from puzzle_align.planning.given_plan import GivenPlan
from puzzle_align.runtime.groups.collectives import from_rank_zero
from puzzle_align.runtime.groups.limits import allow_open_files, check_queues, files_needed
from puzzle_align.runtime.groups.world import (
    World,
    init_distributed,
    ranks_near,
    shutdown_distributed,
)
from puzzle_align.stages.attention import settle_attention
from puzzle_align.stages.inputs import check_inputs, to_resume
from puzzle_align.stages.loop import train
from puzzle_align.stages.plan_report import PlanReport
from puzzle_align.stages.resuming import attention_of
from puzzle_align.stages.setup import plan_job, resolve_engine
from puzzle_align.stages.starts import check_nodes
from puzzle_align.stages.tokenizer import foreign_tokenizers

_logger = logging.getLogger(__name__)


def run(given: JobConfig, plan: GivenPlan | None = None) -> None:
    """Train as the config says, on the ranks that torchrun started.

    Args:
        plan: a file that the job is to run by; at the end, what it predicts is shown beside what
            was measured.

    Raises:
        ValueError: for anything wrong with config, plan, data, weights or reward function, before
            any training starts.
    """
    engine = resolve_engine(given.engine)
    if not names_checkpoints(given):
        raise_first(check_inputs(given))
    timeouts = given.engine.distributed_timeout, given.reward.longest_call
    world = init_distributed(engine.device, *timeouts)
    # Where another run is still at work, checkpoints come and go: one rank looks, for all of them.
    config, kept_attention = from_rank_zero(lambda: _settle(given, world.size))
    placed = plan_job(config, engine, world.size, plan)
    _allow_open_files(placed, world)
    if world.device.type == "cuda":
        check_queues(num_streams(placed, world.rank))
    report = None
    if plan is not None:
        report = PlanReport(plan, world, Path(config.output_dir))
    engine = settle_attention(config, engine, placed, world, kept_attention)
    check_nodes(config, placed)
    stage = import_module(f"{STAGES[config.stage].package}.setup")
    train(config, stage.open_trainer(config, engine, world), world, report)
    shutdown_distributed()


def _allow_open_files(plan: JobPlan, world: World) -> None:
    """Raise the limit for the plan's groups; ValueError, one line, where that cannot be."""
    on_device = world.device.type == "cuda"  # links are, then
    sizes = [
        len(group.ranks)
        for group in groups_of(plan, world.rank)
        if not (group.is_link and on_device) and len(group.ranks) < world.size
    ]
    allow_open_files(files_needed(world.size, ranks_near(world.size), sizes))


def _settle(given: JobConfig, world_size: int) -> tuple[JobConfig, AttentionBackend | None]:
    """The job with the checkpoints that it takes, checked where it takes any, and told of.

    And the attention of the run that it goes on with, where that is known.
    """
    saved = to_resume(given)
    config, kept = (given, []) if saved is None else keep_models(given, saved)
    config = pin_models(config)
    if names_checkpoints(given):
        check_job(config, world_size)
        raise_first(check_inputs(config))
    for line in kept:
        _logger.info("%s", line)
    _tell_of_checkpoints(config)
    return config, None if saved is None else attention_of(saved)


def _tell_of_checkpoints(config: JobConfig) -> None:
    """Say which checkpoints models start from, and whose models of them."""
    for role in role_names(config):
        model, key = role_model(config, role)
        if model.path is not None and not model.random_weights:
            named = named_model(model.path, key)
            if named.saved is not None:
                _logger.info("%s starts from %s", role, named)
    for line in foreign_tokenizers(config):
        _logger.warning("%s", line)
