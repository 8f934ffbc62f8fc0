"""A job plan as JSON and back: the greater part of ``plan.json``."""

from typing import Any

from puzzle_align.layout.job_plan import ContextPlan, JobPlan
from puzzle_align.layout.plain_json import from_plain, to_plain


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
    """Raise ``from_json``'s ValueError if the plan's contexts do not go together."""
    for phase in plan.phases:
        if not phase.contexts or len(set(phase.roles)) != len(phase.roles):
            raise ValueError(
                f"{where}: phase {phase.name} has the roles {list(phase.roles)}: each must be there"
                " once, and one at least; make it again"
            )
        for context in phase.contexts:
            _check_context(context, plan.world_size, f"{where}: the {context.role}'s")


def _check_context(context: ContextPlan, world_size: int, whose: str) -> None:
    plan, ranks = context.plan, context.ranks
    for name, value in vars(plan).items():
        numbers = value if isinstance(value, tuple) else (value,)
        if any(type(number) is int and number < 1 for number in numbers):
            raise ValueError(f"{whose} plan has {name}={value}; make it again")
    in_world, needed = set(ranks) <= set(range(world_size)), plan.world_size
    if not in_world or len(set(ranks)) != len(ranks) or len(ranks) != needed:
        raise ValueError(
            f"{whose} ranks {list(ranks)} are not {needed} different ones of the {world_size}; "
            "make it again"
        )
