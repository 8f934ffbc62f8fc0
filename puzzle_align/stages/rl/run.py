"""A PPO job from its config to its last step."""

import logging

from puzzle_align.config.check import raise_first
from puzzle_align.config.job import JobConfig
from puzzle_align.config.resolve import resolve_role_spec, role_model, role_names
from puzzle_align.data.prepare_prompts import PreparedPrompts, prepare_prompts
from puzzle_align.data.prompts import PromptDataset
from puzzle_align.data.tokenize import Tokenizer
from puzzle_align.runtime.groups import World, init_distributed
from puzzle_align.runtime.reduce import from_rank_zero, shutdown_distributed
from puzzle_align.stages.inputs import cache_folder, check_inputs
from puzzle_align.stages.loop import train
from puzzle_align.stages.rl.trainer import PPOTrainer
from puzzle_align.stages.setup import Engine, plan_job, resolve_engine
from puzzle_align.stages.tokenizer import check_vocabulary, open_tokenizer

_logger = logging.getLogger(__name__)


def run(config: JobConfig) -> None:
    """Train as ``config`` says, on the ranks that torchrun started.

    Raises:
        ValueError: for anything wrong with config, data, weights or reward function, before any
            training starts.
    """
    engine = resolve_engine(config.engine)
    raise_first(check_inputs(config))
    world = init_distributed(engine.device, config.engine.distributed_timeout)
    train(config, open_trainer(config, engine, world), world)
    shutdown_distributed()


def open_trainer(config: JobConfig, engine: Engine, world: World) -> PPOTrainer:
    """This rank's part in the training. Collective over the world."""
    tokenizer = open_tokenizer(config)
    for role in role_names(config):
        check_vocabulary(tokenizer, resolve_role_spec(config, role), role_model(config, role)[1])
    prompts = open_prompts(config, tokenizer, world)
    return PPOTrainer(config, plan_job(config, engine, world.size), world, prompts, tokenizer)


def open_prompts(config: JobConfig, tokenizer: Tokenizer, world: World) -> PromptDataset:
    """Tokenize (or find in the cache) on rank 0, then open on every rank. Collective.

    Raises:
        ValueError: one line, for bad data.
    """
    progress = config.telemetry.progress
    summary = from_rank_zero(lambda: job_prompts(config, tokenizer, progress=progress).summary)
    if world.rank == 0:
        _logger.info("%s", summary)
    return job_prompts(config, tokenizer).train


def job_prompts(
    config: JobConfig, tokenizer: Tokenizer, *, progress: bool = False
) -> PreparedPrompts:
    """The job's prompts, tokenized here or before. ValueError, one line, for bad data."""
    return prepare_prompts(
        config.data,
        tokenizer,
        max_new_tokens=config.generation.max_new_tokens,
        seed=config.seed,
        cache_dir=cache_folder(config),
        progress=progress,
    )
