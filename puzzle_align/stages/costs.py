"""What a job's actions are taken to cost, where schedules are made: measured, or by FLOPs."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from puzzle_align.config.job import JobConfig
from puzzle_align.layout.job_plan import ContextPlan
from puzzle_align.planning.costs import flop_costs
from puzzle_align.planning.load import Load, PassLoad
from puzzle_align.planning.measured import Measured
from puzzle_align.planning.profile import load_profile
from puzzle_align.planning.simulate import TransferTime
from puzzle_align.schedules.costs import Costs, ModelCosts
from puzzle_align.stages.to_plan import job_load


@dataclass(frozen=True)
class JobCosts:
    """Costs of contexts' actions in the mean of the job's rows; without ``measured``, by FLOPs.

    The same job gives the same costs on every rank: schedules are made of them there.
    """

    row_tokens: int
    measured: Measured | None = None
    load: Load | None = None

    def of(self, contexts: Sequence[ContextPlan]) -> Costs:
        """By role; a role may have one context. ValueError for what was not measured."""
        if self.measured is None or self.load is None:
            return {context.role: self._by_flops(context) for context in contexts}
        return {
            context.role: self.measured.action_costs(context, self._rows(self.load, context).row)
            for context in contexts
        }

    def transfer(self, contexts: Sequence[ContextPlan]) -> float | TransferTime:
        """Seconds of a transfer; none where only ratios of times mean something."""
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
        plan = context.plan
        return load.rows(self.row_tokens, load.mini_batches, plan.data, plan.microbatch_multiple)


def job_costs(config: JobConfig) -> JobCosts:
    """The costs of a job.

    Raises:
        ValueError: one line, for a profile that is none.
    """
    name, row_tokens = config.placement.profile, config.packing.row_tokens
    if name is None:
        return JobCosts(row_tokens)
    try:
        measured = Measured(load_profile(Path(name)), noisy=True)
    except ValueError as error:
        raise ValueError(f"placement.profile: {error}") from error
    return JobCosts(row_tokens, measured, job_load(config))
