"""Predicted times of a job's phases: costs of actions, measured or by FLOPs, and runs."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from importlib import import_module
from pathlib import Path

from puzzle_align.config.job import JobConfig
from puzzle_align.data.loader import ExampleLoader, plan_view
from puzzle_align.layout.job_plan import ContextPlan, Phase
from puzzle_align.layout.plan import ParallelPlan
from puzzle_align.planning.costs.flops import flop_costs
from puzzle_align.planning.costs.measured import Measured
from puzzle_align.planning.costs.profile import Profile, load_profile
from puzzle_align.planning.load import Load, PassLoad
from puzzle_align.planning.prediction import Count, PredictedRun
from puzzle_align.runtime.groups.collectives import from_rank_zero
from puzzle_align.schedules.costs import Costs, ModelCosts
from puzzle_align.schedules.timing import TransferTime


@dataclass(frozen=True)
class JobCosts:
    """Costs of contexts' actions on the job's mean row; without ``measured``, by FLOPs.

    The same job gives the same costs on every rank, since every rank makes schedules from them.
    """

    row_tokens: int
    measured: Measured | None = None
    load: Load | None = None

    def of(self, contexts: Sequence[ContextPlan]) -> Costs:
        """Costs by role, one context a role. ValueError if a cost was not measured."""
        if self.measured is None or self.load is None:
            return {context.role: self._by_flops(context) for context in contexts}
        return {
            context.role: self.measured.action_costs(context, self._rows(self.load, context).row)
            for context in contexts
        }

    def transfer(self, contexts: Sequence[ContextPlan]) -> float | TransferTime:
        """Seconds of a transfer; 0 with costs by FLOPs, which are only relative."""
        if self.measured is None or self.load is None:
            return 0.0
        return self.measured.transfer(contexts, self._rows(self.load, contexts[0]).row)

    def _by_flops(self, context: ContextPlan) -> ModelCosts:
        return flop_costs(
            context.model,
            context.plan,
            context.options,
            row_tokens=self.row_tokens,
            train=context.workload == "train",
        )

    def _rows(self, load: Load, context: ContextPlan) -> PassLoad:
        return load.rows(self.row_tokens, load.mini_batches, context.plan)


def costs_everywhere(config: JobConfig) -> JobCosts:
    """``job_costs`` by rank 0's file, since all ranks make one schedule from them. Collective."""
    return job_costs(config, lambda path: from_rank_zero(partial(load_profile, path)))


def job_costs(config: JobConfig, load: Callable[[Path], Profile] = load_profile) -> JobCosts:
    """Costs of a job.

    Args:
        load: reads the job's profile.

    Raises:
        ValueError: one line, for a file that is not a profile.
    """
    name, row_tokens = config.placement.profile, config.packing.row_tokens
    if name is None:
        return JobCosts(row_tokens)
    try:
        measured = Measured(load(Path(name)))
    except ValueError as error:
        raise ValueError(f"placement.profile: {error}") from error
    outlook = import_module("puzzle_align.stages.outlook").open_outlook(config)  # imports this
    return JobCosts(row_tokens, measured, outlook.load())


def predicted_run(
    costs: JobCosts, phase: Phase, counts: Mapping[str, Count], num_passes: int = 1
) -> PredictedRun:
    """Predict passes of a phase; ``counts`` are microbatches by role."""
    return PredictedRun(
        phase=phase,
        num_microbatches=counts,
        costs=costs.of(phase.contexts),
        num_passes=num_passes,
        transfer=costs.transfer(phase.contexts),
    )


def counted(loader: ExampleLoader, phase: Phase) -> dict[str, Count]:
    """Count the microbatches of every role in the data; ``loader`` is any rank's."""
    views = {c.role: loader.seen_by(plan_view(c.plan)) for c in phase.contexts}
    return {role: lru_cache(view.num_microbatches) for role, view in views.items()}


def same_in_every_pass(phase: Phase, num_rows: int) -> dict[str, Count]:
    """Microbatches of every role if each pass has ``num_rows`` rows."""
    numbers = {context.role: spread(num_rows, context.plan) for context in phase.contexts}
    return {role: lambda _, number=number: number for role, number in numbers.items()}


def spread(num_rows: int, plan: ParallelPlan) -> int:
    """Microbatches of each data rank of a plan for ``num_rows`` rows."""
    multiple = plan.microbatch_multiple
    return -(-num_rows // (plan.data * multiple)) * multiple
