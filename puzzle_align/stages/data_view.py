"""What one rank of a model sees of a global batch: the arguments of a loader that plans decide."""

from typing import TypedDict

from puzzle_align.layout.plan import ParallelPlan
from puzzle_align.runtime.context import Context


class DataView(TypedDict):
    """A loader's arguments that depend on a model's plan and this rank's place in it."""

    data_rank: int
    data_size: int
    microbatch_multiple: int
    sequence_multiple: int


def data_view(context: Context) -> DataView:
    """What this rank of ``context`` sees of a global batch."""
    return plan_view(context.plan, context.data_rank)


def plan_view(plan: ParallelPlan, data_rank: int) -> DataView:
    """What data-parallel rank ``data_rank`` of a plan sees of a global batch."""
    return {
        "data_rank": data_rank,
        "data_size": plan.data,
        "microbatch_multiple": plan.microbatch_multiple,
        "sequence_multiple": plan.tensor if plan.sequence_parallel else 1,
    }
