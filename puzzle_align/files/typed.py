"""One reader of foreign values: plain data as frozen dataclasses, and kinds of values.

Numbers are finite, and integers fit 64 bits.
"""

import math
import types
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, Literal, Protocol, TypeVar, Union, get_args, get_origin, get_type_hints

from puzzle_align.files.messages import quoted, shown

T = TypeVar("T")
AGAIN = "; make it again"  # how ``from_plain``'s errors end
# A float32 that is neither 0 nor subnormal is from so far from 0 to so far.
SMALLEST_FP32, LARGEST_FP32 = 1.1754943508222875e-38, 3.4028234663852886e38
MOST_INT32, MOST_INT64 = 2**31 - 1, 2**63 - 1


def from_plain(cls: type[T], data: Any, where: str) -> T:
    """The dataclass that ``json_file.to_plain`` gave.

    Args:
        where: what errors call ``data``: a file.

    Raises:
        ValueError: one line with ``where``, the place in it and the cure, for anything else.
    """
    return _build(cls, data, where)


def _build(hint: Any, value: Any, where: str) -> Any:
    """``value`` as what a type hint asks for: dataclasses, tuples, mappings, literals, plain."""
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
    if origin is dict:
        return {key: _build(arms[1], item, f"{where}.{shown(key)}") for key, item in value.items()}
    return _build_dataclass(hint, value, where) if is_dataclass(hint) else value


def _build_dataclass(cls: Any, value: Mapping[str, Any], where: str) -> Any:
    hints, names = get_type_hints(cls), [item.name for item in fields(cls)]
    for name in value.keys() ^ set(names):
        what = "is unknown" if name in value else "is missing"
        raise ValueError(f"{where}: key '{shown(name)}' {what}{AGAIN}")
    return cls(**{name: _build(hints[name], value[name], f"{where}.{name}") for name in names})


def _fits(hint: Any, value: Any) -> bool:
    origin = get_origin(hint)
    if hint is Any:
        return True
    if origin is Literal:
        return value in get_args(hint)
    if origin is tuple:
        return isinstance(value, list)
    if origin is dict:
        return isinstance(value, Mapping)
    if is_dataclass(hint):
        return isinstance(value, Mapping)
    if type(value) is int and hint in (int, float):
        return abs(value) <= MOST_INT64
    return type(value) is hint and (hint is not float or math.isfinite(value))


def _wrong(hint: Any, value: Any, where: str) -> ValueError:
    return ValueError(f"{where}: {quoted(value)} is not {shown(hint)}{AGAIN}")


class Kind(Protocol):
    """Values of a kind. Types are taken strictly: True is no number, 2.0 not whole."""

    def problem(self, value: Any) -> str | None:
        """What is wrong with a value, as the end of a sentence that begins with it; or None."""
        ...


@dataclass(frozen=True)
class Whole:
    """Whole numbers in a range."""

    least: int
    most: int

    def problem(self, value: Any) -> str | None:
        """See Kind."""
        if type(value) is int and self.least <= value <= self.most:
            return None
        return f"must be a whole number from {self.least} to {self.most}"


@dataclass(frozen=True)
class Real:
    """Finite numbers in a range."""

    least: float
    most: float

    def problem(self, value: Any) -> str | None:
        """See Kind."""
        if type(value) in (int, float) and self.least <= value <= self.most:
            return None
        return f"must be a number from {self.least:g} to {self.most:g}"


@dataclass(frozen=True)
class Flag:
    """True or false."""

    def problem(self, value: Any) -> str | None:
        """See Kind."""
        return None if type(value) is bool else "must be true or false"


@dataclass(frozen=True)
class Text:
    """Any text."""

    def problem(self, value: Any) -> str | None:
        """See Kind."""
        return None if type(value) is str else "must be a text"


@dataclass(frozen=True)
class Only:
    """A few values; where there are none, the key must not be there."""

    values: tuple[Any, ...] = ()

    def problem(self, value: Any) -> str | None:
        """See Kind."""
        if any(type(value) is type(own) and value == own for own in self.values):
            return None
        only = " or ".join(map(repr, self.values))
        return f"is not supported: only {only} is" if only else "is not supported: remove it"


@dataclass(frozen=True)
class ListOf:
    """Lists of values of a kind."""

    item: Kind

    def problem(self, value: Any) -> str | None:
        """See Kind."""
        if type(value) is not list:
            return "must be a list"
        problems = ((item, self.item.problem(item)) for item in value)
        found = next(((item, problem) for item, problem in problems if problem), None)
        return None if found is None else f"holds {quoted(found[0])}, which {found[1]}"


@dataclass(frozen=True)
class Either:
    """Values of one kind or another."""

    one: Kind
    other: Kind

    def problem(self, value: Any) -> str | None:
        """See Kind."""
        problems = self.one.problem(value), self.other.problem(value)
        return None if None in problems else " or ".join(map(str, problems))


@dataclass(frozen=True)
class Table:
    """Mappings: the values of these keys are of a kind each, or null; others may be anything."""

    keys: Mapping[str, Kind]

    def problem(self, value: Any) -> str | None:
        """See Kind."""
        return None if isinstance(value, Mapping) else "must be a mapping"

    def problem_inside(self, value: Mapping[str, Any], outer: str = "") -> str | None:
        """What is wrong with the first key that is, after its name and value; or None."""
        for key, kind in self.keys.items():
            own, name = value.get(key), f"{outer}{key}"
            problem = None if own is None else kind.problem(own)
            if problem is not None:
                return f"{name}={quoted(own)} {problem}"
            if isinstance(kind, Table) and own is not None:
                inside = kind.problem_inside(own, f"{name}.")
                if inside is not None:
                    return inside
        return None
