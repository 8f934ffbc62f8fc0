"""What a job's plan predicts of its training steps: for pictures, beside what is measured."""

from collections.abc import Callable, Mapping
from functools import lru_cache, partial

from puzzle_align.data.loader import PairLoader
from puzzle_align.planning.steps import PlacedModel, PreferenceRun
from puzzle_align.spec.job import JobConfig
from puzzle_align.spec.plan import ParallelPlan
from puzzle_align.spec.roles import resolve_placement, trained_role
from puzzle_align.stages.preference_data import plan_view
from puzzle_align.stages.setup import RoleSetup
from puzzle_align.stages.work import action_costs

Count = Callable[[int], int]  # microbatches of a step on each data rank


def forecast(
    config: JobConfig, setups: Mapping[str, RoleSetup], counts: Mapping[str, Count], num_steps: int
) -> PreferenceRun:
    """The job's run of ``num_steps``; ``setups`` and ``counts`` are by role.

    A reference that runs before training only is left out.
    """
    runs_reference = "reference" in setups and not config.dpo.precompute_ref_log_probs
    placed = {
        role: PlacedModel(
            role=role, plan=setup.plan, ranks=setup.ranks, num_microbatches=counts[role]
        )
        for role, setup in setups.items()
    }
    return PreferenceRun(
        policy=placed[trained_role(config)],
        reference=placed["reference"] if runs_reference else None,
        placement=resolve_placement(config),
        costs=action_costs(setups, config.packing.row_tokens),
        num_steps=num_steps,
    )


def counted(loader: PairLoader, setups: Mapping[str, RoleSetup]) -> dict[str, Count]:
    """The microbatches of every role as the data has them; ``loader`` is any rank's."""
    views = {role: loader.seen_by(**plan_view(s.plan, data_rank=0)) for role, s in setups.items()}

    def count(view: PairLoader, step: int) -> int:
        return len(view.batch(step).microbatches)

    return {role: lru_cache(partial(count, view)) for role, view in views.items()}


def same_in_every_step(
    num_microbatches: int, trained: ParallelPlan, setups: Mapping[str, RoleSetup]
) -> dict[str, Count]:
    """The trained model's as given; another plan splits as many rows over its own data ranks."""
    num_rows = num_microbatches * trained.data

    def count(plan: ParallelPlan) -> int:
        if plan == trained:
            return num_microbatches
        multiple = plan_view(plan, data_rank=0)["microbatch_multiple"]
        return -(-num_rows // (plan.data * multiple)) * multiple

    numbers = {role: count(setup.plan) for role, setup in setups.items()}
    return {role: lambda step, number=number: number for role, number in numbers.items()}
