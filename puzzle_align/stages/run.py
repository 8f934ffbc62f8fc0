"""A training job from its config to its last step."""

from importlib import import_module

from puzzle_align.config.check import raise_first
from puzzle_align.config.job import JobConfig
from puzzle_align.config.stages import STAGES
from puzzle_align.runtime.groups import init_distributed
from puzzle_align.runtime.reduce import shutdown_distributed
from puzzle_align.stages.inputs import check_inputs
from puzzle_align.stages.loop import train
from puzzle_align.stages.setup import resolve_engine


def run(config: JobConfig) -> None:
    """Train as ``config`` says, on the ranks that torchrun started.

    Raises:
        ValueError: for anything wrong with config, data, weights or reward function, before any
            training starts.
    """
    engine = resolve_engine(config.engine)
    raise_first(check_inputs(config))
    world = init_distributed(engine.device, config.engine.distributed_timeout)
    stage = import_module(f"{STAGES[config.stage].package}.setup")
    train(config, stage.open_trainer(config, engine, world), world)
    shutdown_distributed()
