"""A job plan as JSON and back: the greater part of ``plan.json``."""

from typing import Any

from puzzle_align.files.json_file import to_plain
from puzzle_align.files.messages import shown
from puzzle_align.files.typed import from_plain
from puzzle_align.layout.job_plan import ContextPlan, JobPlan
from puzzle_align.layout.plan import MOST_RANKS
from puzzle_align.schedules.registry import schedule_problem


def to_json(plan: JobPlan) -> dict[str, Any]:
    """The plan as mappings, lists and plain values."""
    return to_plain(plan)


def from_json(data: Any, where: str = "plan") -> JobPlan:
    """The plan that ``to_json`` gave.

    Args:
        where: what errors call ``data``: a file.

    Raises:
        ValueError: one line with ``where``, the place in it and the cure, for anything else.
    """
    plan = from_plain(JobPlan, data, where)
    check_job_plan(plan, where)
    return plan


def check_job_plan(plan: JobPlan, where: str) -> None:
    """Raise ``from_json``'s ValueError if the plan's contexts contradict each other."""
    if not 1 <= plan.world_size <= MOST_RANKS:
        raise ValueError(
            f"{where}: world_size={plan.world_size} is not a number of ranks; make it again"
        )
    if not plan.phases:
        raise ValueError(f"{where}: it has no phases; make it again")
    for phase in plan.phases:
        if not phase.contexts or len(set(phase.roles)) != len(phase.roles):
            raise ValueError(
                f"{where}: phase {shown(phase.name)} has the roles {shown(list(phase.roles))}: "
                "each must be there once, and one at least; make it again"
            )
        for context in phase.contexts:
            _check_context(context, plan.world_size, f"{where}: the {shown(context.role)}'s")


def _check_context(context: ContextPlan, world_size: int, whose: str) -> None:
    plan, ranks = context.plan, context.ranks
    for name, value in vars(plan).items():
        numbers = value if isinstance(value, tuple) else (value,)
        if any(type(number) is int and number < 1 for number in numbers):
            raise ValueError(f"{whose} plan has {name}={shown(value)}; make it again")
    if schedule_problem(plan.schedule, plan.virtual_pipeline):
        raise ValueError(f"{whose} plan has schedule={shown(plan.schedule)}; make it again")
    in_world, needed = set(ranks) <= set(range(world_size)), plan.world_size
    if not in_world or len(set(ranks)) != len(ranks) or len(ranks) != needed:
        raise ValueError(
            f"{whose} ranks {shown(list(ranks))} are not {needed} different ones of the "
            f"{world_size}; make it again"
        )
