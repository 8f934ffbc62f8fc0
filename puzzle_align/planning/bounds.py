"""What is known of a pass before it is simulated: the least time it takes, the most it keeps.

The time is ``schedules.bound``'s; the memory, what models keep one after the other, which
time-sharing never exceeds (``schedules.timeshare``).
"""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import pairwise

from puzzle_align.layout.job_plan import ContextPlan
from puzzle_align.planning.prediction import PredictedRun
from puzzle_align.planning.simulate import TransferTime
from puzzle_align.schedules.actions import Action, Kind, Program
from puzzle_align.schedules.bound import Hops, busiest_rank, least_makespan
from puzzle_align.schedules.registry import schedule_for, schedule_named


def least_time(run: PredictedRun, counts: Mapping[str, float]) -> float:
    """Seconds that a pass of colocated models takes at least, so many microbatches by role.

    ``iteration.steady`` never gives less.
    """
    phase = run.phase
    if phase.is_fed and phase.order == "time_shared":
        number = phase.contexts[0].plan.pipeline  # as many microbatches of each
        work = max(counts.values()) * busiest_rank(run.costs, number)
        return max(_of_group(run, phase.trained, counts), work)
    return _of_group(run, phase.contexts, counts)


def _of_group(
    run: PredictedRun, group: Sequence[ContextPlan], counts: Mapping[str, float]
) -> float:
    """Seconds that colocated contexts take at least, whatever the order."""
    roles = [context.role for context in group]
    number = group[0].plan.pipeline
    hops = [_hops(run.transfer, role, number) for role in roles]
    own, numbers = [run.costs[role] for role in roles], [counts[role] for role in roles]
    return least_makespan(own, numbers, number, hops)


def _hops(transfer: float | TransferTime, role: str, num_ranks: int) -> Hops:
    if not callable(transfer):
        same = (transfer,) * (num_ranks - 1)
        return same, same
    pairs = list(pairwise(range(num_ranks)))
    return [transfer(role, *pair) for pair in pairs], [transfer(role, b, a) for a, b in pairs]


def most_kept(run: PredictedRun) -> dict[str, tuple[float, ...]]:
    """Bytes of activations that pipeline ranks keep at most, by trained role.

    ``PredictedRun.peak_activations`` never gives more. Colocated models have one figure, the
    largest of theirs.
    """
    found: dict[str, tuple[float, ...]] = {}
    for group in run.phase.colocated:
        trained = [context for context in group if context.workload == "train"]
        kept = [_kept_alone(run, context) for context in trained]
        most = tuple(map(max, zip(*kept, strict=True)))
        found |= {context.role: most for context in trained}
    return found


def _kept_alone(run: PredictedRun, context: ContextPlan) -> tuple[float, ...]:
    plan, count = context.plan, run.num_microbatches[context.role](0)
    if not schedule_named(plan.schedule, plan.virtual_pipeline).holds_all:
        count = min(count, 3 * plan.pipeline)  # later groups of P only repeat what the third does
    activation = run.costs[context.role].activation
    program = Program("", count, plan.virtual_pipeline, schedule=plan.schedule)
    return _peaks(program, plan.pipeline, activation)


@lru_cache(maxsize=4096)
def _peaks(program: Program, num_ranks: int, activation: tuple[float, ...]) -> tuple[float, ...]:
    """Most activations of a model's own schedule, by pipeline rank."""
    return tuple(
        _peak(actions, activation[rank::num_ranks])
        for rank, actions in enumerate(schedule_for(program, num_ranks))
    )


def _peak(actions: Sequence[Action], kept: Sequence[float]) -> float:
    """Most that one rank's actions keep at once; ``kept`` is by chunk."""
    live = peak = 0.0
    for action in actions:
        live += kept[action.chunk] if action.kind is Kind.FORWARD else -kept[action.chunk]
        peak = max(peak, live)
    return peak
