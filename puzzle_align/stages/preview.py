"""What a stage tells of a job before anything runs, for validation and for pictures of schedules.

The module ``preview`` of a stage's package has three functions:
- ``preview(config, plan, tokenizer, found)``: data and load of a job that is validated;
- ``drawn_runs(config, plan, num_steps=..., num_microbatches=...)``: what there is to draw;
- ``drawn_lines(config, num_microbatches)``: what that takes for granted.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf

from puzzle_align.layout.job_plan import Phase
from puzzle_align.layout.plan import ParallelPlan
from puzzle_align.planning.job_memory import GenerationSizes
from puzzle_align.planning.prediction import PredictedRun
from puzzle_align.schedules.registry import schedule_named

# Microbatches a pipeline rank and chunk whose lists are proven: more of them repeat the steady
# state, in which no rank keeps more.
_NUM_PROVEN = 4


@dataclass(frozen=True)
class Preview:
    """Lines for people, and what the job's memory is estimated with.

    ``runs``: of every phase that has action lists, a pass with as many microbatches as there may
    be; none where the job has no plan.
    """

    lines: list[str] = field(default_factory=list)
    runs: list[PredictedRun] = field(default_factory=list)
    generation: GenerationSizes | None = None


def plural(number: int | str) -> str:
    """``1 microbatch``, ``4 microbatches``."""
    return f"{number} microbatch{'es' * (str(number) != '1')}"


def phase_line(phase: Phase, counts: Mapping[str, int] | None = None) -> str:
    """Which models run together in a phase, in which order, and on how many microbatches each.

    ``counts`` are by role; None leaves them out.
    """
    groups: list[str] = []
    for group in phase.colocated:
        first, *others = group
        roles = ", ".join(context.role for context in group)
        if others and len(phase.colocated) > 1:
            roles += " time-shared" if phase.shares_time(group) else " one after the other"
        number = None if counts is None else plural(counts[first.role])
        groups.append(roles if number is None else f"{roles} ({number})")
    order = f", {phase.order}" if len(phase.contexts) > 1 else ""
    return f"{phase.name}{order}: {'; '.join(groups)}"


def proven_rows(plan: ParallelPlan) -> float:
    """Rows of a pass that keeps as much as any longer one; infinite where longer ones keep more."""
    if schedule_named(plan.schedule, plan.virtual_pipeline).holds_all:
        return inf
    return _NUM_PROVEN * plan.pipeline * plan.virtual_pipeline * plan.data


def check_multiple(num_microbatches: int, run: PredictedRun) -> None:
    """Raise a one-line ValueError if a trained model cannot have so many in a pass."""
    for context in run.phase.trained:
        multiple = context.plan.microbatch_multiple
        if num_microbatches % multiple:
            raise ValueError(
                f"--microbatches {num_microbatches}: with model chunks a step takes a multiple of"
                f" the {multiple} pipeline ranks; choose one"
            )
