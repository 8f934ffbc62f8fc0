"""``plan.json``: a plan chosen for a job, and its predictions.

The file holds the ``JobPlan`` and the settings. A job with this file runs them unchanged, after
checking that they fit the job (``config.chosen_plan``).
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from puzzle_align.config.chosen_plan import ChosenPlan
from puzzle_align.files.json_file import read_versioned, write_dataclass
from puzzle_align.files.typed import from_plain
from puzzle_align.layout.job_plan import JobPlan, Settings, check_job_plan
from puzzle_align.planning.memory.job import ranks_named

FORMAT = 2


@dataclass(frozen=True, kw_only=True)
class Predicted:
    """Prediction of an iteration in steady state: for ppo a whole iteration, else a step.

    ``phases`` have the names that a run reports: for stage ppo ``switch`` (if the actor samples
    under another plan; part of ``learn`` if it overlaps the optimizer's step), ``generate``,
    ``score``, ``learn``; for the others ``train``, and for kto ``kl``. ``beside`` is work beside
    the iterations: ``precompute``, the reference's pass before the first, and ``evaluate``, one
    evaluation.
    """

    iteration: float  # seconds
    phases: dict[str, float]  # seconds by name
    memory: dict[str, int]  # peak bytes of a device, by ranks: 0-3,8
    beside: dict[str, float] = field(default_factory=dict)  # seconds by name


@dataclass(frozen=True, kw_only=True)
class GivenPlan(ChosenPlan):
    """A plan file to run by; ``source`` is its path."""

    predicted: Predicted


@dataclass(frozen=True, kw_only=True)
class PlanFile:
    """Contents of the file. ``notes`` are text: why this plan was chosen, and others were not."""

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
    """Read a plan file; ValueError, one line with file, place and cure, if it is invalid."""
    data = read_versioned(path, FORMAT, "make it with puzzle-align plan")
    plan = from_plain(PlanFile, data, str(path))
    check_job_plan(plan.job_plan, f"{path}.job_plan")
    for ranks in plan.predicted.memory:
        ranks_named(ranks, f"{path}.predicted.memory", plan.job_plan.world_size)
    return plan.given(str(path))
