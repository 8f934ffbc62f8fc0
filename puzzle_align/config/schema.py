"""The keys of a config class under dotted names: what ``--help`` lists and errors suggest."""

import types
from collections.abc import Iterator
from dataclasses import MISSING, dataclass, fields, is_dataclass
from typing import Any, Union, get_args, get_origin, get_type_hints


@dataclass(frozen=True)
class Key:
    """One key: a value, or a section of further keys."""

    name: str  # dotted
    type: type  # without None; a section's is its dataclass
    optional: bool  # whether null is a value
    default: Any
    doc: str
    unit: str
    choices: tuple[str, ...]

    @property
    def is_section(self) -> bool:
        """Whether the key holds further keys."""
        return is_dataclass(self.type)


def section_keys(cls: type, prefix: str = "") -> dict[str, Key]:
    """The keys directly inside a config dataclass, by field name; dotted names get ``prefix``."""
    hints = get_type_hints(cls)
    found = {}
    for item in fields(cls):
        kind, optional = _without_none(hints[item.name])
        default = item.default if item.default_factory is MISSING else item.default_factory()
        found[item.name] = Key(
            name=f"{prefix}{item.name}",
            type=kind,
            optional=optional,
            default=default,
            doc=item.metadata.get("doc", ""),
            unit=item.metadata.get("unit", ""),
            choices=item.metadata.get("choices", ()),
        )
    return found


def all_keys(cls: type, prefix: str = "") -> Iterator[Key]:
    """Every key of a config dataclass, a section before its keys."""
    for key in section_keys(cls, prefix).values():
        yield key
        if key.is_section:
            yield from all_keys(key.type, f"{key.name}.")


def _without_none(hint: Any) -> tuple[type, bool]:
    """``(kind, optional)`` of ``kind`` or ``kind | None``; a parametrised ``dict[...]`` is dict."""
    optional = get_origin(hint) in (Union, types.UnionType)
    if optional:
        hint = next(arm for arm in get_args(hint) if arm is not type(None))
    return get_origin(hint) or hint, optional
