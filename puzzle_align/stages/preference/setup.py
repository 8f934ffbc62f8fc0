"""What a preference job trains with, on each of its ranks."""

from puzzle_align.config.resolve import Job
from puzzle_align.runtime.groups.world import World
from puzzle_align.stages.preference.concurrent import ReferenceTrainer, connect
from puzzle_align.stages.preference.trainer import PreferenceTrainer
from puzzle_align.stages.trainer import Trainer


def open_trainer(job: Job, world: World) -> Trainer:
    """This rank's part: to train, or to run the reference beside it. Collective over the world.

    Raises:
        ValueError: one line, for bad data, weights or a tokenizer.
    """
    phase = job.plan.phase("train")
    if phase.order != "concurrent":
        return PreferenceTrainer(job, world)
    own = connect(phase.contexts, world)
    if world.rank in phase.trained[0].ranks:
        return PreferenceTrainer(job, world, own)
    return ReferenceTrainer(job, world, own)
