"""``plan.json``: a plan chosen for a job, and its predictions.

The file holds the ``JobPlan`` and the sizes as they are. A job with it runs them as they are, where
they fit it (``config.chosen_plan``).
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from puzzle_align.config.chosen_plan import ChosenPlan
from puzzle_align.files.json_file import read_versioned, write_dataclass
from puzzle_align.files.messages import shown
from puzzle_align.files.typed import from_plain
from puzzle_align.layout.job_plan import JobPlan, Settings, check_job_plan
from puzzle_align.planning.memory.job import ranks_named

FORMAT = 2


@dataclass(frozen=True, kw_only=True)
class Predicted:
    """The prediction of an iteration in steady state: of ppo one of its own, else a step.

    ``phases`` are named as a run reports them: of stage ppo ``switch`` (where another plan samples,
    unless weights go there beside the optimizer's step: it is in learn then), ``generate``,
    ``score``, ``learn``; of the others ``train``.
    """

    iteration: float  # seconds
    phases: dict[str, float]  # seconds by name
    memory: dict[str, int]  # most bytes that a device holds, by ranks: 0-3,8


@dataclass(frozen=True, kw_only=True)
class GivenPlan(ChosenPlan):
    """A plan file to run by; ``source`` is its path."""

    predicted: Predicted


@dataclass(frozen=True, kw_only=True)
class PlanFile:
    """A plan with its sizes, for a device, and its predictions.

    ``notes`` are for people: why it was chosen, and why others were not.
    """

    job_plan: JobPlan
    settings: Settings
    device: Literal["cpu", "cuda"]
    predicted: Predicted
    notes: tuple[str, ...] = ()
    format: int = FORMAT

    def given(self, source: str) -> GivenPlan:
        """The plan to run by; ``source`` is the file's path."""
        return GivenPlan(
            source=source,
            plan=self.job_plan,
            settings=self.settings,
            device=self.device,
            predicted=self.predicted,
        )


def save_plan(plan: PlanFile, path: Path) -> None:
    """Write the file, whole or not at all."""
    write_dataclass(plan, path)


def open_plan(path: Path) -> GivenPlan:
    """The plan in a file; ValueError, one line with file, place and cure, if invalid."""
    data = read_versioned(path, FORMAT, "make it with puzzle-align plan")
    plan = from_plain(PlanFile, data, str(path))
    check_job_plan(plan.job_plan, f"{path}.job_plan")
    _check_predicted(plan.predicted, plan.job_plan.world_size, f"{path}.predicted")
    return plan.given(str(path))


def _check_predicted(predicted: Predicted, world_size: int, where: str) -> None:
    times = {f"phases.{name}": seconds for name, seconds in predicted.phases.items()}
    for name, seconds in {"iteration": predicted.iteration, **times}.items():
        if not math.isfinite(seconds) or seconds < 0:
            raise ValueError(
                f"{where}.{shown(name)}: expected seconds, got {seconds}; make it again"
            )
    for name, size in predicted.memory.items():
        ranks_named(name, f"{where}.memory", world_size)
        if size < 0:
            raise ValueError(f"{where}.memory: {size} bytes on {shown(name)}; make it again")
