"""Action lists of whole passes: of one model, or of several that share their ranks."""

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache

from puzzle_align.runtime.executor import ModelRun
from puzzle_align.schedules.actions import Action, Program
from puzzle_align.schedules.costs import Costs, ModelCosts
from puzzle_align.schedules.dependencies import Dependencies
from puzzle_align.schedules.lowering import lower
from puzzle_align.schedules.timeshare import one_after_the_other, time_share
from puzzle_align.schedules.timing import timeline_of
from puzzle_align.schedules.validate import validate


def action_list(runs: Mapping[str, ModelRun], costs: Costs | None = None) -> list[Action]:
    """Make this rank's actions for whole passes of models that share their ranks.

    Args:
        runs: by role, in the same order on all ranks; plans may differ only in layers and chunks
            of a rank. Each run has its own rows, the same number on all its ranks.
        costs: by role, the same on all ranks: the models share time, in an order chosen to be
            short. None runs one model after the other, in the order of ``runs``.
    """
    contexts = [run.context for run in runs.values()]
    plans = {replace(context.plan.grid, virtual_pipeline=1) for context in contexts}
    assert len(plans) == 1, "the models' plans differ"
    programs = tuple(
        Program(
            role,
            len(run.rows),
            run.context.plan.virtual_pipeline,
            backward=run.train,
            schedule=run.context.plan.schedule,
        )
        for role, run in runs.items()
    )
    known = None if costs is None else tuple((role, costs[role]) for role in runs)
    return schedule(programs, contexts[0].plan.pipeline, known)[contexts[0].pipeline_rank]


@lru_cache(maxsize=64)
def schedule(
    programs: tuple[Program, ...],
    num_ranks: int,
    costs: tuple[tuple[str, ModelCosts], ...] | None = None,
) -> list[list[Action]]:
    """Make the validated, lowered lists of ``action_list``, one for each pipeline rank."""
    timeline = None
    if costs is None:
        lists = one_after_the_other(programs, num_ranks)
    else:
        lists = time_share(programs, num_ranks, dict(costs))
        timeline = timeline_of(lists, Dependencies(programs, num_ranks), dict(costs))
    lowered = lower(lists, programs, timeline)
    validate(lowered, programs)
    return lowered
