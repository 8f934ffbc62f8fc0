"""A job plan as JSON and back: what ``plan.json`` holds."""

import types
from collections.abc import Mapping
from dataclasses import asdict, fields, is_dataclass
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from puzzle_align.layout.job_plan import ContextPlan, JobPlan


def to_json(plan: JobPlan) -> dict[str, Any]:
    """The plan as mappings, lists and plain values."""
    return _plain(asdict(plan))


def from_json(data: Any, where: str = "plan") -> JobPlan:
    """The plan that ``to_json`` gave.

    Args:
        where: what errors call ``data``: a file.

    Raises:
        ValueError: one line with ``where``, the place in it and the cure, for anything else.
    """
    plan: JobPlan = _build(JobPlan, data, where)
    for phase in plan.phases:
        if not phase.contexts or len(set(phase.roles)) != len(phase.roles):
            raise ValueError(
                f"{where}: phase {phase.name} has the roles {list(phase.roles)}: each must be there"
                " once, and one at least; make the plan again"
            )
        for context in phase.contexts:
            _check_context(context, plan.world_size, f"{where}: the {context.role}'s")
    return plan


def _check_context(context: ContextPlan, world_size: int, whose: str) -> None:
    plan, ranks = context.plan, context.ranks
    for name, value in vars(plan).items():
        numbers = value if isinstance(value, tuple) else (value,)
        if any(type(number) is int and number < 1 for number in numbers):
            raise ValueError(f"{whose} plan has {name}={value}; make the plan again")
    in_world, needed = set(ranks) <= set(range(world_size)), plan.world_size
    if not in_world or len(set(ranks)) != len(ranks) or len(ranks) != needed:
        raise ValueError(
            f"{whose} ranks {list(ranks)} are not {needed} different ones of the {world_size}; "
            "make the plan again"
        )


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, tuple) else value


def _build(hint: Any, value: Any, where: str) -> Any:
    """``value`` as what a type hint asks for: dataclasses, tuples, literals, plain types."""
    origin, arms = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        fitting = [arm for arm in arms if _fits(arm, value)]
        if not fitting:
            raise _wrong(hint, value, where)
        return _build(fitting[0], value, where)
    if not _fits(hint, value):
        raise _wrong(hint, value, where)
    if origin is tuple:
        return tuple(_build(arms[0], item, f"{where}[{n}]") for n, item in enumerate(value))
    return _build_dataclass(hint, value, where) if is_dataclass(hint) else value


def _build_dataclass(cls: Any, value: Mapping[str, Any], where: str) -> Any:
    hints, names = get_type_hints(cls), [item.name for item in fields(cls)]
    for name in value.keys() ^ set(names):
        what = "is unknown" if name in value else "is missing"
        raise ValueError(f"{where}: key {name!r} {what}; make the plan again")
    return cls(**{name: _build(hints[name], value[name], f"{where}.{name}") for name in names})


def _fits(hint: Any, value: Any) -> bool:
    origin = get_origin(hint)
    if origin is Literal:
        return value in get_args(hint)
    if origin is tuple:
        return isinstance(value, list)
    if is_dataclass(hint):
        return isinstance(value, Mapping)
    return type(value) is hint or (hint is float and type(value) is int)


def _wrong(hint: Any, value: Any, where: str) -> ValueError:
    return ValueError(f"{where}: {value!r} is not {hint}; make the plan again")
