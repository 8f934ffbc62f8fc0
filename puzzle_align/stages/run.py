"""A training job from its config to its last step."""

import logging
from importlib import import_module

from puzzle_align.config.check import raise_first
from puzzle_align.config.job import JobConfig
from puzzle_align.config.model_path import named_model
from puzzle_align.config.resolve import pin_models, role_model, role_names
from puzzle_align.config.stages import STAGES
from puzzle_align.runtime.groups import init_distributed
from puzzle_align.runtime.reduce import from_rank_zero, shutdown_distributed
from puzzle_align.stages.inputs import check_inputs
from puzzle_align.stages.loop import train
from puzzle_align.stages.setup import resolve_engine

_logger = logging.getLogger(__name__)


def run(given: JobConfig) -> None:
    """Train as the config says, on the ranks that torchrun started.

    Raises:
        ValueError: for anything wrong with config, data, weights or reward function, before any
            training starts.
    """
    engine = resolve_engine(given.engine)
    raise_first(check_inputs(given))
    world = init_distributed(engine.device, given.engine.distributed_timeout)
    # One rank looks: where another run is still at work, the latest checkpoint may change.
    config = from_rank_zero(lambda: pin_models(given))
    if world.rank == 0:
        _tell_of_checkpoints(config)
    stage = import_module(f"{STAGES[config.stage].package}.setup")
    train(config, stage.open_trainer(config, engine, world), world)
    shutdown_distributed()


def _tell_of_checkpoints(config: JobConfig) -> None:
    """Say which checkpoints models start from, and whose models of them."""
    for role in role_names(config):
        model, key = role_model(config, role)
        if model.path is not None and key == f"{role}.model":
            named = named_model(model.path, key)
            if named.saved is not None and not model.random_weights:
                _logger.info("%s starts from %s", role, named)
