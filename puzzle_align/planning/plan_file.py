"""``plan.json``: a plan that was chosen for a job, and what is predicted of it.

A job's config is what makes its plan: the file holds the config keys that the choice comes to, by
their dotted names, and beside them the plan that they are to make. Who reads the file gives the
keys to the config and holds the plan that comes out against the file's (``planning.given_plan``),
so that a prediction is never beside a job that it was not made for.
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from puzzle_align.files.json_file import read_versioned, write_dataclass
from puzzle_align.files.messages import shown
from puzzle_align.files.typed import from_plain
from puzzle_align.layout.job_plan import JobPlan
from puzzle_align.layout.job_plan_json import check_job_plan
from puzzle_align.planning.memory.job import ranks_named

FORMAT = 1


@dataclass(frozen=True, kw_only=True)
class Predicted:
    """What is predicted of an iteration in steady state: of ppo one of its own, else a step.

    ``phases`` are named as a run reports them: of stage ppo ``switch`` (where another plan samples,
    unless weights go there beside the optimizer's step: it is in learn then), ``generate``,
    ``score``, ``learn``; of the others ``train``.
    """

    iteration: float  # seconds
    phases: dict[str, float]  # seconds by name
    memory: dict[str, int]  # most bytes that a device holds, by ranks: 0-3,8


@dataclass(frozen=True, kw_only=True)
class PlanFile:
    """A plan, its predictions, and for people: why it was chosen, what others lost by.

    ``keys`` are the config's by dotted name, with values as YAML has them, and are set in their
    order: null before a section's keys empties it first. All that the prediction rests on may be
    among them, such as ``global_batch_size``: a job with the file has no other value of any. What
    a config leaves to the machine, such as ``engine.dtype``, should be: the plan has its outcome,
    and where another machine decides otherwise the job is refused.
    """

    keys: dict[str, Any]
    job_plan: JobPlan
    predicted: Predicted
    notes: tuple[str, ...] = ()
    format: int = FORMAT

    @property
    def stage(self) -> str:
        """The stage of the jobs that it is for."""
        return self.job_plan.stage

    @property
    def world_size(self) -> int:
        """The ranks that it is for."""
        return self.job_plan.world_size


def save_plan(plan: PlanFile, path: Path) -> None:
    """Write the file, whole or not at all."""
    write_dataclass(plan, path)


def load_plan(path: Path) -> PlanFile:
    """The plan in a file; ValueError, one line with file, place and cure, where it is none."""
    data = read_versioned(path, FORMAT, "make it with puzzle-align plan")
    plan = from_plain(PlanFile, data, str(path))
    check_job_plan(plan.job_plan, f"{path}.job_plan")
    _check_predicted(plan.predicted, plan.world_size, f"{path}.predicted")
    return plan


def _check_predicted(predicted: Predicted, world_size: int, where: str) -> None:
    times = {f"phases.{name}": seconds for name, seconds in predicted.phases.items()}
    for name, seconds in {"iteration": predicted.iteration, **times}.items():
        if not math.isfinite(seconds) or seconds < 0:
            raise ValueError(f"{where}.{shown(name)}: {seconds} are no seconds; make it again")
    for name, size in predicted.memory.items():
        ranks_named(name, f"{where}.memory", world_size)
        if size < 0:
            raise ValueError(f"{where}.memory: {size} bytes on {shown(name)}; make it again")
