"""What `bench_timeshare.py` compares: schedules, what they are predicted to take, and bounds."""

from collections.abc import Sequence
from dataclasses import dataclass

from puzzle_align.planning.simulate import simulate
from puzzle_align.schedules.actions import Action, Program
from puzzle_align.schedules.costs import Costs
from puzzle_align.schedules.lookahead import LookaheadStep, lookahead_step
from puzzle_align.schedules.lowering import lower
from puzzle_align.schedules.registry import schedule_for
from puzzle_align.schedules.timeshare import one_after_the_other, time_share
from puzzle_align.schedules.validate import validate

Lists = list[list[Action]]
POLICY, REFERENCE, CRITIC = "actor", "reference", "critic"
NUM_SETTLING = 2  # the first steps with lookahead differ from those that follow


@dataclass(frozen=True)
class TwoTrainings:
    """Lowered lists of two models' training, one after the other and time-shared."""

    sequential: Lists
    time_shared: Lists


def two_trainings(num_ranks: int, num_microbatches: int, costs: Costs) -> TwoTrainings:
    """Actor and critic, as many microbatches each."""
    programs = Program(POLICY, num_microbatches), Program(CRITIC, num_microbatches)
    sequential = lower(one_after_the_other(programs, num_ranks), programs)
    time_shared = lower(time_share(programs, num_ranks, costs), programs)
    validate(sequential, programs)
    validate(time_shared, programs)
    return TwoTrainings(sequential, time_shared)


def two_trainings_bound(num_ranks: int, num_microbatches: int, costs: Costs) -> float:
    """Equation (1) of the paper; costs must be the same on all ranks."""
    passes = [costs[role].forward[0] + costs[role].backward[0] for role in (POLICY, CRITIC)]
    bubble = num_ranks - 1
    longest = num_microbatches * sum(passes) + bubble * max(passes)
    return (num_microbatches + bubble) * sum(passes) / longest


def sequential_step(num_ranks: int, num_microbatches: int, costs: Costs) -> float:
    """Predicted time of a DPO step with the whole batch's reference before the policy."""
    total = 0.0
    for program in (
        Program(REFERENCE, num_microbatches, backward=False),
        Program(POLICY, num_microbatches),
    ):
        lists = lower(schedule_for(program, num_ranks), [program])
        total += simulate(lists, costs).makespan
    return total


def lookahead_steps(
    num_ranks: int, num_microbatches: int, costs: Costs, num_steps: int
) -> list[LookaheadStep]:
    """The first steps of a run, none of which is its last."""
    steps: list[LookaheadStep] = []
    for _ in range(num_steps):
        made = lookahead_step(
            Program(POLICY, num_microbatches),
            REFERENCE,
            num_microbatches,
            num_ranks=num_ranks,
            costs=costs,
            done=steps[-1].done if steps else (),
        )
        steps.append(made)
    return steps


def step_times(steps: Sequence[LookaheadStep], costs: Costs) -> list[float]:
    """Predicted time of every step; the costs need not be those that its order was made for."""
    return [simulate(s.lists, costs).makespan for s in steps]


def lookahead_bound(num_ranks: int, num_microbatches: int, costs: Costs) -> float:
    """Most that lookahead can gain; costs must be the same on all ranks."""
    forward, backward = costs[POLICY].forward[0], costs[POLICY].backward[0]
    reference = costs[REFERENCE].forward[0]
    length = num_microbatches + num_ranks - 1
    work = forward + backward + reference
    return length * work / max(length * (forward + backward), num_microbatches * work)
