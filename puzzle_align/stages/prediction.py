"""What a job's plan predicts of its phases: for validation, pictures, and beside measures."""

from collections.abc import Mapping
from functools import lru_cache, partial

from puzzle_align.data.loader import ExampleLoader, plan_view
from puzzle_align.layout.job_plan import Phase
from puzzle_align.layout.plan import ParallelPlan
from puzzle_align.planning.prediction import Count, PredictedRun
from puzzle_align.stages.costs import JobCosts


def predicted_run(
    costs: JobCosts, phase: Phase, counts: Mapping[str, Count], num_passes: int = 1
) -> PredictedRun:
    """A phase in so many passes; ``counts`` are by role."""
    return PredictedRun(
        phase=phase,
        num_microbatches=counts,
        costs=costs.of(phase.contexts),
        num_passes=num_passes,
        transfer=costs.transfer(phase.contexts),
    )


def counted(loader: ExampleLoader, phase: Phase) -> dict[str, Count]:
    """The microbatches of every role as the data has them; ``loader`` is any rank's."""
    views = {c.role: loader.seen_by(**plan_view(c.plan, data_rank=0)) for c in phase.contexts}

    def count(view: ExampleLoader, step: int) -> int:
        return len(view.batch(step).microbatches)

    return {role: lru_cache(partial(count, view)) for role, view in views.items()}


def same_in_every_pass(phase: Phase, num_rows: int) -> dict[str, Count]:
    """The microbatches of every role where ``num_rows`` rows make a pass."""
    numbers = {context.role: spread(num_rows, context.plan) for context in phase.contexts}
    return {role: lambda _, number=number: number for role, number in numbers.items()}


def spread(num_rows: int, plan: ParallelPlan) -> int:
    """The microbatches of each data rank of a plan that ``num_rows`` rows make."""
    multiple = plan_view(plan, data_rank=0)["microbatch_multiple"]
    return -(-num_rows // (plan.data * multiple)) * multiple
