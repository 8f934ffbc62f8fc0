"""What is known of a pass before it is simulated: the least time it takes, the most it keeps.

The time is ``schedules.bound``'s; the memory, what models keep one after the other, which
time-sharing never exceeds (``schedules.timeshare``).
"""

from collections.abc import Mapping, Sequence

from puzzle_align.layout.job_plan import ContextPlan
from puzzle_align.planning.prediction import PredictedRun
from puzzle_align.schedules.bound import least_makespan, work_of
from puzzle_align.schedules.costs import ModelCosts


def least_time(run: PredictedRun, counts: Mapping[str, float]) -> tuple[float, float]:
    """The least that a pass of so many microbatches takes, by role; nothing is idle in it.

    As ``iteration.steady``, without simulating.
    """
    phase = run.phase
    if phase.is_fed and phase.order == "time_shared":
        trained = least_seconds(phase.trained, run.costs, counts)
        number = phase.trained[0].plan.pipeline
        busiest = max(
            sum(counts[c.role] * work_of(run.costs[c.role], rank, number) for c in phase.contexts)
            for rank in range(number)
        )
        return max(trained, busiest), 0.0
    seconds = [least_seconds(group, run.costs, counts) for group in phase.colocated]
    return (max(seconds) if phase.order == "concurrent" else sum(seconds)), 0.0


def least_seconds(
    group: Sequence[ContextPlan], costs: Mapping[str, ModelCosts], counts: Mapping[str, float]
) -> float:
    """The least that colocated contexts take for so many microbatches each, by role."""
    roles = [context.role for context in group]
    own, numbers = [costs[role] for role in roles], [counts[role] for role in roles]
    return least_makespan(own, numbers, group[0].plan.pipeline)


def most_kept(context: ContextPlan, costs: ModelCosts, count: int) -> tuple[float, ...]:
    """Bytes of activations that each pipeline rank keeps in the model's own schedule."""
    plan = context.plan
    ranks, chunks = plan.pipeline, plan.virtual_pipeline
    found = []
    for rank in range(ranks):
        kept = costs.activation[rank::ranks]
        if chunks == 1:
            found.append(min(count, ranks - rank) * kept[0])
            continue
        # Interleaved: so many forwards before the first backward, and one more beside it.
        live = min((chunks - 1) * ranks + 2 * (ranks - rank - 1) + 1, count * chunks)
        found.append(_largest(kept, live, ranks))
    return tuple(found)


def _largest(kept: Sequence[float], live: int, ranks: int) -> float:
    """Bytes of the first ``live`` forwards of a rank, which go chunk by chunk in groups of P."""
    total, left, chunk = 0.0, live, 0
    while left > 0:
        taken = min(left, ranks)
        total += taken * kept[chunk % len(kept)]
        left -= taken
        chunk += 1
    return total
