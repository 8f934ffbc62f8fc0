"""A preference job from its config to its last step."""

from puzzle_align.config.check import raise_first
from puzzle_align.config.job import JobConfig
from puzzle_align.runtime.groups import World, init_distributed
from puzzle_align.runtime.reduce import shutdown_distributed
from puzzle_align.stages.inputs import check_inputs
from puzzle_align.stages.loop import Trainer, train
from puzzle_align.stages.preference.concurrent import ReferenceTrainer, connect
from puzzle_align.stages.preference.trainer import PreferenceTrainer
from puzzle_align.stages.setup import Engine, plan_job, resolve_engine


def run(config: JobConfig) -> None:
    """Train as ``config`` says, on the ranks that torchrun started.

    Raises:
        ValueError: for anything wrong with config, data or weights, before any training starts.
    """
    engine = resolve_engine(config.engine)
    raise_first(check_inputs(config))
    world = init_distributed(engine.device, config.engine.distributed_timeout)
    train(config, open_trainer(config, engine, world), world)
    shutdown_distributed()


def open_trainer(config: JobConfig, engine: Engine, world: World) -> Trainer:
    """This rank's part: to train, or to run the reference beside it. Collective."""
    plan = plan_job(config, engine, world.size)
    phase = plan.phase("train")
    if phase.order != "concurrent":
        return PreferenceTrainer(config, plan, world)
    own = connect(phase.contexts, world)
    if world.rank in phase.trained[0].ranks:
        return PreferenceTrainer(config, plan, world, own)
    return ReferenceTrainer(config, plan, world, own)
